"""Old name, until its callers have moved: to be deleted."""

from fedjax_cluster.report.curves import curves

__all__ = ["curves"]
