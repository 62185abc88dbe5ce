"""Differential privacy of whole clients: clipping and Gaussian noise as a value given to a method, and its budget."""

from fedjax_cluster.privacy.budget import Budget, calibrated, check_accountant, spent
from fedjax_cluster.privacy.gaussian import gaussian
