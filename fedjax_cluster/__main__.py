"""`python -m fedjax_cluster COMMAND` is `fedjax-cluster COMMAND`."""

import sys

from fedjax_cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
