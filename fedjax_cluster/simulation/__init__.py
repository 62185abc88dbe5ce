"""Running a method on a federation: the round loop, what it returns, and the directory that it leaves.

Submodules are imported when first used, above all `checkpoints`, whose library takes a second.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
