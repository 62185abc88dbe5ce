"""The papers' tables and figures, a module a paper; `catalogue` has them by name. Imported when first used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
