"""Old name, until its callers have moved: to be deleted."""

from fedjax_cluster.report.clusters import client_features, group_by_cluster

__all__ = ["client_features", "group_by_cluster"]
