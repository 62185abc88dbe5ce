"""Old names, until their callers have moved: to be deleted."""

from fedjax_cluster.report.bars import bars, bars_against_paper
from fedjax_cluster.report.curves import learning_curves, round_curves, sweep
from fedjax_cluster.report.methods.cfl_gp import singular_values
from fedjax_cluster.report.style import save

__all__ = ["bars", "bars_against_paper", "learning_curves", "round_curves", "save", "singular_values", "sweep"]
