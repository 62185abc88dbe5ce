"""Ways to divide examples among clients that differ: each returns a `Federation`."""

from fedjax_cluster.data.scenarios.images import mixed_datasets, mixture, rotated
from fedjax_cluster.data.scenarios.labels import dirichlet, heterogeneity_levels, label_groups
from fedjax_cluster.data.scenarios.meanings import label_permutation, label_shift, label_swap
from fedjax_cluster.data.scenarios.natural import users
from fedjax_cluster.data.scenarios.overlap import class_overlap
from fedjax_cluster.data.scenarios.registry import SCENARIOS
from fedjax_cluster.data.scenarios.skews import shards, size_skew
from fedjax_cluster.data.scenarios.synthetic import linear_regression, xor
from fedjax_cluster.data.scenarios.texts import topics
from fedjax_cluster.data.scenarios.visual import domains
from fedjax_cluster.data.scenarios.wireless import channels
