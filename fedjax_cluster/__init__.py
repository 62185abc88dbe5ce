"""Clustered federated learning in JAX: every client in one stacked pytree, trained in parallel.

Submodules are imported when first used; `__init__.pyi` names what there is.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"
