"""CFL-GP like its published code, in PyTorch and NumPy: a loop over clients, the profiles in one array, their full SVD,
scikit-learn's k-means.

    python -m benchmarks.peers.cfl_gp FOLDER RATE EVERY THREADS    # prints one JSON object

FOLDER holds what `whole.write_work` left. Imports neither JAX nor this package, so that the process need not load them.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans

Tensors = dict[str, Any]
Forward = Callable[[Tensors, Any], Any]


def mlp(w: Tensors, x: Any) -> Any:
    hidden = F.relu(F.linear(x.flatten(1), w["hidden_0/kernel"], w["hidden_0/bias"]))
    return F.linear(hidden, w["output/kernel"], w["output/bias"])


class PublishedCflGp:
    """Algorithm 1: one mini-batch gradient of each client a round; a clustering round queries one more model."""

    def __init__(self, forward: Forward, models: Sequence[Tensors], assignment: np.ndarray, threads: int):
        torch.set_num_threads(threads)
        self.forward, self.models = forward, list(models)
        self.assignment, self.block = assignment.copy(), 0
        self.updates = np.zeros(len(models), int)
        size = sum(value.numel() for value in models[0].values())
        self.profile = np.zeros((len(assignment), len(models), size), np.float32)

    def gradient(self, slot: int, x: Any, y: Any) -> tuple[tuple[Any, ...], float]:
        weights = {name: value.detach().requires_grad_() for name, value in self.models[slot].items()}
        loss = F.cross_entropy(self.forward(weights, x.float() / 255), y)
        return torch.autograd.grad(loss, list(weights.values())), float(loss.detach())

    def train(self, x: Any, y: Any, batches: Any, rate: float, *, cluster: bool) -> float:
        """One round; with `cluster`, the queried gradients, the embedding, k-means and matching too.

        Args:
          x, y: of all clients, [M, N, ...].
          batches: each client's rows, [M, b].
          rate: γ.

        Returns:
          The clients' mean loss.
        """
        losses, count = [], len(self.models)
        totals = [[torch.zeros_like(value) for value in model.values()] for model in self.models]
        share = 1 / (self.updates[self.block] + 1)
        for client, rows in enumerate(batches):
            slot, images, labels = int(self.assignment[client]), x[client][rows], y[client][rows]
            gradient, loss = self.gradient(slot, images, labels)
            losses.append(loss)
            torch._foreach_add_(totals[slot], gradient)
            if cluster:
                if slot != self.block:
                    gradient, _ = self.gradient(self.block, images, labels)
                row = self.profile[client, self.block]
                row *= 1 - share
                row -= share * torch.cat([part.flatten() for part in gradient]).numpy()
        sizes = np.bincount(self.assignment, minlength=count)
        for model, total, size in zip(self.models, totals, sizes, strict=True):
            torch._foreach_add_(list(model.values()), total, alpha=-rate / max(size, 1))
        if cluster:
            self.updates[self.block] += 1
            self.block = (self.block + 1) % count
            matrix = self.profile.reshape(len(x), -1)
            _, _, right = np.linalg.svd(matrix, full_matrices=False)
            kmeans = KMeans(count, n_init=10, random_state=0)  # pyright: ignore[reportArgumentType]
            found = kmeans.fit_predict(matrix @ right[:count].T)
            table = np.zeros((count, count))
            np.add.at(table, (found, self.assignment), 1)
            self.assignment = linear_sum_assignment(-table)[1][found]
        return float(np.mean(losses))

    @torch.no_grad()
    def accuracy(self, x: Any, y: Any, num_examples: Any) -> float:
        """Mean over clients of the share of test rows that a client's model gets right."""
        shares = []
        for client, count in enumerate(num_examples):
            images, labels = x[client][:count].float() / 255, y[client][:count]
            outputs = self.forward(self.models[int(self.assignment[client])], images)
            shares.append((outputs.argmax(1) == labels).float().mean())
        return float(torch.stack(shares).mean())


def main(folder: str, rate: str, every: str, threads: str) -> None:
    home = pathlib.Path(folder)
    train_x, train_y, test_x, test_y, test_count, batches = (
        torch.from_numpy(np.load(home / f"{name}.npy"))
        for name in ("train_x", "train_y", "test_x", "test_y", "test_num_examples", "batches")
    )
    models = [
        {name: torch.from_numpy(value) for name, value in np.load(path).items()}
        for path in sorted(home.glob("model_*.npz"))
    ]
    method = PublishedCflGp(mlp, models, np.load(home / "assignment.npy"), int(threads))
    losses = [
        method.train(train_x, train_y, rows, float(rate), cluster=i % int(every) == 1 % int(every))
        for i, rows in enumerate(batches)
    ]
    found = {"losses": losses, "accuracy": method.accuracy(test_x, test_y, test_count)}
    print(json.dumps({**found, "assignment": method.assignment.tolist()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
