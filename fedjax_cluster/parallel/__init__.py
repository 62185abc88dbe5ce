"""Clients over the machine: the mapping, rows of clients, and the one loop that maps and reduces over clients."""

from fedjax_cluster.parallel import processes
from fedjax_cluster.parallel.ahead import CohortsAhead, in_chunks, read_cohorts
from fedjax_cluster.parallel.chunks import MOST_AT_A_TIME, bytes_per_client
from fedjax_cluster.parallel.contributions import Contribution, Reduced
from fedjax_cluster.parallel.kept_programs import kept_program
from fedjax_cluster.parallel.loop import Client, Mapped, for_each_client, run_if
from fedjax_cluster.parallel.mapping import (
    AXIS,
    client_mapping,
    client_mesh,
    constrain_state,
    device_memory,
    keep_compiled,
    memory_left,
    num_devices,
    place_rows,
    place_state,
    platform,
    replicate,
    row_sharding,
    use_all_cores,
)
from fedjax_cluster.parallel.processes import ProcessLost, agreed, fetched, is_first, several, start_processes
from fedjax_cluster.parallel.programs import compile_quickly, enable_compilation_cache, release_programs
from fedjax_cluster.parallel.rows import (
    deal,
    gains_by_dealing,
    gather_cohort,
    gather_rows,
    gram,
    on_each_device,
    on_own_rows,
    place_population,
    put_back,
    scatter_rows,
    to_each_device,
    whole_population,
)
from fedjax_cluster.parallel.tiles import packed, unpacked
from fedjax_cluster.parallel.unless import unless
from fedjax_cluster.types import ClientMapping, Population
