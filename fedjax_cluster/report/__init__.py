"""Tables and pictures of finished runs; submodules are loaded when first used, so that matplotlib waits until then.

Tables: `tables`. Pictures: `curves` (metrics against rounds or a parameter), `bars`, `clusters` (clients by features,
groups by clusters), `similarity_matrix`, and those of one method in `methods`; all of a run: `pages`. Shared by them:
`style` (sizes, colours, saving), `histories`, `names`, `paper_rows`, `finished_run`. Functions that draw return a
`matplotlib.figure.Figure`, and neither show nor save it.
"""

import importlib
from types import ModuleType

MODULES = (
    *("bars", "clusters", "curves", "finished_run", "histories", "methods", "names", "pages", "paper_rows"),
    *("similarity_matrix", "style", "tables"),
)


def __getattr__(name: str) -> ModuleType:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
