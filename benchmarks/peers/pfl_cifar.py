"""pfl's CIFAR-10 benchmark, its CNN and settings, in one process or in several that share an accelerator.

    python -m benchmarks.peers.pfl_cifar ROUNDS COHORT BATCH RATE CLIENTS ROWS

or the same under `python -m torch.distributed.run --nproc-per-node N`; the first process prints the seconds of every
round. Images are noise.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

# pfl joins the other processes as it is imported.
# isort: off
from benchmarks.peers import one_gpu
from benchmarks.peers.pfl_fedavg import train
from pfl.data.federated_dataset import FederatedDataset  # pyright: ignore[reportMissingImports]
from pfl.data.sampling import get_user_sampler  # pyright: ignore[reportMissingImports]
from pfl.internal.ops.pytorch_ops import get_default_device  # pyright: ignore[reportMissingImports]

# isort: on

__all__ = ["one_gpu"]


class Cnn(torch.nn.Module):
    """Two 3×3 convolutions, maxima, a dense layer of 128, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU()),
            *(torch.nn.MaxPool2d(2), torch.nn.Dropout(0.25), torch.nn.Flatten()),
            *(torch.nn.Linear(64 * 14 * 14, 128), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(128, 10)),
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x.permute(0, 3, 1, 2))

    def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
        self.train(not eval)
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Any, y: Any, eval: bool = True) -> dict[str, Any]:
        return {}


def main(rounds: int, cohort: int, batch: int, rate: float, clients: int, rows: int) -> None:
    device = get_default_device()
    np.random.seed(0)  # noqa: NPY002  (pfl draws cohorts by it, in all processes the same)
    torch.manual_seed(0)
    # As in pfl's own script, all rows are on the device from the start, normalised and in float32.
    x = torch.randn(clients, rows, 32, 32, 3, device=device)
    y = torch.randint(0, 10, (clients, rows), device=device)
    users = get_user_sampler("random", range(clients))
    dataset = FederatedDataset.from_slices(list(zip(x, y, strict=True)), users)
    with contextlib.redirect_stdout(sys.stderr):  # pfl prints its metrics
        seconds = train(Cnn().to(device), dataset, cohort, batch, rate, rounds + 1)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"seconds": seconds, "device": str(device)}), flush=True)


if __name__ == "__main__":
    main(*(int(text) if text.isdigit() else float(text) for text in sys.argv[1:]))  # pyright: ignore[reportArgumentType]
