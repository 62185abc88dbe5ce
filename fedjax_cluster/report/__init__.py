"""Tables and pictures of finished runs; submodules are loaded when first used, so that matplotlib waits until then.

Tables: `tables`, and what a table is in `table`; methods against one another: `significance`. Pictures: `curves`
(metrics against rounds or a parameter), `small_multiples` (of many methods), `panels` (of several settings), `bars`,
`clusters` (clients by features, groups by clusters), `client_labels` (who has which), `timeline` (who was in which
cluster when), `similarity_matrix`, and those of one method in `methods`; all of a run: `pages`. HTML: `run_page` and
`comparison_page`, made of the parts in `web_page`, with the looks of `page_style` and the words of `headlines` and
`captions`. Shared by them: `style` (sizes, colours, saving), `histories`, `names`, `paper_rows`, `shown_clients`.
Functions that draw return a `matplotlib.figure.Figure`, one paper column wide unless their text says otherwise, and
neither show nor save it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
