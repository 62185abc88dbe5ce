"""Data: sources of examples, and scenarios that divide them among clients."""

from fedjax_cluster.data import cache, scenarios
from fedjax_cluster.data.by_name import load
from fedjax_cluster.data.downloads import openml
from fedjax_cluster.data.encoded_clients import ClientRows
from fedjax_cluster.data.hugging_face import from_partitioner, huggingface
from fedjax_cluster.data.image_folders import image_folder
from fedjax_cluster.data.joining import joined
from fedjax_cluster.data.leaf_files import leaf
from fedjax_cluster.data.local_files import npz, table
from fedjax_cluster.data.populations import in_memory, on_devices, open_population, write_population
from fedjax_cluster.data.sources import DatasetNotFoundError, digits, from_arrays, tfds
from fedjax_cluster.data.validation import check_federation

__all__ = [
    "ClientRows",
    "DatasetNotFoundError",
    "cache",
    "check_federation",
    "digits",
    "from_arrays",
    "from_partitioner",
    "huggingface",
    "image_folder",
    "in_memory",
    "joined",
    "leaf",
    "load",
    "npz",
    "on_devices",
    "open_population",
    "openml",
    "scenarios",
    "table",
    "tfds",
    "write_population",
]
