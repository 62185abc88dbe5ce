from . import cells as cells
from . import comparison as comparison
from . import config as config
from . import flag_groups as flag_groups
from . import flags as flags
from . import recipe as recipe
from . import runs as runs
from . import saved_runs as saved_runs
