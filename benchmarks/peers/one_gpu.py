"""Importing this before pfl lets several of its processes share a GPU.

pfl takes a GPU for each process, and NCCL between them, which refuses two on one.
"""

from __future__ import annotations

import os
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

_join: Any = torch.distributed.init_process_group
_choose: Any = torch.cuda.set_device


def _over_gloo(*args: Any, **options: Any) -> None:
    _join(*args, **options | {"backend": "gloo"})


def _the_first(device: Any) -> None:
    _choose(0)


if torch.cuda.is_available():
    os.environ.setdefault("PFL_PYTORCH_DEVICE", "cuda:0")
torch.distributed.init_process_group, torch.cuda.set_device = _over_gloo, _the_first
