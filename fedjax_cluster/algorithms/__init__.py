"""The methods: one file each, or a folder with the parts of one; `REGISTRY` has them by name."""

from fedjax_cluster.algorithms.cfl.cfl import cfl
from fedjax_cluster.algorithms.cfl_gp.cfl_gp import cfl_gp
from fedjax_cluster.algorithms.ditto import ditto
from fedjax_cluster.algorithms.fairavg import fairavg
from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.algorithms.fedavgm import fedavgm
from fedjax_cluster.algorithms.fedem import fedem
from fedjax_cluster.algorithms.fedgwc.fedgwc import fedgwc
from fedjax_cluster.algorithms.fedper import fedper
from fedjax_cluster.algorithms.fedproto import fedproto
from fedjax_cluster.algorithms.fedprox import fedprox
from fedjax_cluster.algorithms.fedrep import fedrep
from fedjax_cluster.algorithms.fedsoft import fedsoft
from fedjax_cluster.algorithms.fesem import fesem
from fedjax_cluster.algorithms.fl_hc import fl_hc
from fedjax_cluster.algorithms.flag.flag import flag
from fedjax_cluster.algorithms.flexcfl import flexcfl
from fedjax_cluster.algorithms.gradient_loss import gradient_loss
from fedjax_cluster.algorithms.ifca import ifca
from fedjax_cluster.algorithms.local_only import local_only
from fedjax_cluster.algorithms.method import REGISTRY, Method
from fedjax_cluster.algorithms.pacfl import pacfl
from fedjax_cluster.algorithms.per_fedavg import per_fedavg
from fedjax_cluster.algorithms.pfedme import pfedme
from fedjax_cluster.algorithms.scaffold import scaffold
from fedjax_cluster.algorithms.stocfl import stocfl
