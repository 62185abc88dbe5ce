"""Models, and layers that stay fast when every client has its own weights."""

from fedjax_cluster.nn.autoencoder import csi_autoencoder
from fedjax_cluster.nn.convolution import convolution
from fedjax_cluster.nn.layers import Conv, Dense
from fedjax_cluster.nn.models import cnn, lenet5, linear, mlp
from fedjax_cluster.nn.pooling import avg_pool, max_pool
from fedjax_cluster.nn.precision import mixed_precision
from fedjax_cluster.nn.recurrent import lstm
from fedjax_cluster.nn.residual import mobilenet_v2, resnet18
from fedjax_cluster.nn.wrapping import Sized, from_flax

__all__ = [
    "Conv",
    "Dense",
    "Sized",
    "avg_pool",
    "cnn",
    "convolution",
    "csi_autoencoder",
    "from_flax",
    "lenet5",
    "linear",
    "lstm",
    "max_pool",
    "mixed_precision",
    "mlp",
    "mobilenet_v2",
    "resnet18",
]
