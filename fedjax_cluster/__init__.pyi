from . import aggregation as aggregation
from . import algorithms as algorithms
from . import bench as bench
from . import clustering as clustering
from . import cohorts as cohorts
from . import data as data
from . import experiments as experiments
from . import faults as faults
from . import files as files
from . import local as local
from . import nn as nn
from . import optimizers as optimizers
from . import parallel as parallel
from . import recipes as recipes
from . import report as report
from . import server as server
from . import simulation as simulation
from .experiments.config import RunConfig as RunConfig
from .experiments.runs import load_run as load_run
from .experiments.runs import resume as resume
from .parallel.programs import enable_compilation_cache as enable_compilation_cache
from .simulation.abstract import PopulationShape as PopulationShape
from .simulation.loop import simulate as simulate
from .simulation.planning import Plan as Plan
from .simulation.planning import plan as plan
from .simulation.result import SimulationResult as SimulationResult

__version__: str
