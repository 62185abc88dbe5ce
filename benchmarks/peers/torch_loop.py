"""What people write instead, in PyTorch: the same models from the same parameters, on the same batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

from benchmarks.peers.cfl_gp import Forward, Tensors
from fedjax_cluster import tree
from fedjax_cluster.types import Variables

# -------------------------------------------------------------------------------------------- models


def parameters(variables: Variables) -> Tensors:
    """This package's parameters in PyTorch's layouts; statistics of batch norm are left out."""
    tensors = {}
    convolutions = [leaf.shape[-1] for leaf in jax.tree.leaves(variables.params) if leaf.ndim == 4]
    for name, leaf in zip(tree.paths(variables.params), jax.tree.leaves(variables.params), strict=True):
        value = np.asarray(leaf)
        if value.ndim == 4:
            value = value.transpose(3, 2, 0, 1)
        elif value.ndim == 2 and not name.startswith("embedding"):
            if convolutions and name == "hidden_0/kernel":
                # Rows are (height, width, channel) here, (channel, height, width) there.
                side = math.isqrt(len(value) // convolutions[-1])
                value = value.reshape(side, side, convolutions[-1], -1).transpose(2, 0, 1, 3).reshape(value.shape)
            value = value.T
        tensors[name] = torch.from_numpy(value.copy())
    return tensors


def cnn(w: Tensors, x: Any) -> Any:
    x = x.movedim(-1, 1) if x.ndim == 4 else x[:, None]
    for i in range(2):
        x = F.relu(F.max_pool2d(F.conv2d(x, w[f"conv_{i}/kernel"], w[f"conv_{i}/bias"], padding=2), 2))
    x = F.relu(F.linear(x.flatten(1), w["hidden_0/kernel"], w["hidden_0/bias"]))
    return F.linear(x, w["output/kernel"], w["output/bias"])


def lenet5(w: Tensors, x: Any) -> Any:
    x = x.movedim(-1, 1) if x.ndim == 4 else x[:, None]
    for i in range(2):
        x = F.relu(F.max_pool2d(F.conv2d(x, w[f"conv_{i}/kernel"], w[f"conv_{i}/bias"]), 2))
    x = x.flatten(1)
    for name in ("hidden_0", "hidden_1"):
        x = F.relu(F.linear(x, w[f"{name}/kernel"], w[f"{name}/bias"]))
    return F.linear(x, w["output/kernel"], w["output/bias"])


def resnet18(w: Tensors, x: Any) -> Any:
    def norm(x: Any, name: str) -> Any:
        return F.batch_norm(x, None, None, w[f"{name}/scale"], w[f"{name}/bias"], training=True)

    x = F.relu(norm(F.conv2d(x.movedim(-1, 1), w["conv_0/kernel"], padding=1), "norm_0"))
    for stage in range(4):
        for block in range(2):
            name, strides = f"stage_{stage}_block_{block}", 2 if stage and not block else 1
            shortcut = x
            x = F.relu(norm(F.conv2d(x, w[f"{name}/conv_0/kernel"], stride=strides, padding=1), f"{name}/norm_0"))
            x = norm(F.conv2d(x, w[f"{name}/conv_1/kernel"], padding=1), f"{name}/norm_1")
            if strides == 2:
                shortcut = norm(F.conv2d(shortcut, w[f"{name}/shortcut/kernel"], stride=2), f"{name}/shortcut_norm")
            x = F.relu(x + shortcut)
    return F.linear(x.mean((2, 3)), w["output/kernel"], w["output/bias"])


def lstm(w: Tensors, tokens: Any) -> Any:
    layers = sorted({name.partition("/")[0] for name in w if name.startswith("lstm_")})
    x, flat = F.embedding(tokens, w["embedding/embedding"]), []
    for name in layers:
        bias = w[f"{name}/bias"]
        # PyTorch adds one bias to each of the two products.
        flat += [w[f"{name}/kernel"], w[f"{name}/recurrent_kernel"], bias, torch.zeros_like(bias)]
    start = x.new_zeros(len(layers), len(x), w["lstm_0/recurrent_kernel"].shape[-1])
    x = torch.lstm(x, (start, start), flat, True, len(layers), 0.0, True, False, True)[0]
    return F.linear(x, w["output/kernel"], w["output/bias"])


# ------------------------------------------------------------------------------------- local training


def mean_loss(forward: Forward, w: Tensors, x: Any, y: Any) -> Any:
    """The mean cross-entropy of images of bytes, or of sequences of tokens over all their places."""
    outputs = forward(w, x.float() / 255 if x.dtype == torch.uint8 else x)
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten())


def train_client(
    forward: Forward, start: Tensors, x: Any, y: Any, batches: Any, rate: float
) -> tuple[Tensors, list[Any]]:
    """One client's SGD steps on the given rows: its changes, and the loss before each step."""
    own = {name: value.clone().requires_grad_() for name, value in start.items()}
    leaves, losses = list(own.values()), []
    for rows in batches:
        loss = mean_loss(forward, own, x[rows], y[rows])
        gradient = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            torch._foreach_add_(leaves, gradient, alpha=-rate)
        losses.append(loss.detach())
    return {name: value.detach() - start[name] for name, value in own.items()}, losses


def loop(
    forward: Forward, start: Tensors, x: Any, y: Any, batches: Any, rate: float, threads: int
) -> tuple[Tensors, float]:
    """A plain loop over clients: the mean of their changes, and their mean loss."""
    torch.set_num_threads(threads)
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    losses: list[Any] = []
    for client in range(len(x)):
        change, own = train_client(forward, start, x[client], y[client], batches[client], rate)
        losses += own
        for name, value in change.items():
            total[name] += value / len(x)
    return total, float(torch.stack(losses).mean())


def gradients_of_all(forward: Forward) -> Any:
    """Gradients and losses of clients with parameters of their own."""
    return torch.func.vmap(torch.func.grad_and_value(partial(mean_loss, forward)))


def vmapped(
    forward: Forward, start: Tensors, x: Any, y: Any, batches: Any, rate: float, threads: int, gradients: Any = None
) -> tuple[Tensors, float]:
    """All clients at once by torch.func.vmap."""
    torch.set_num_threads(threads)
    count = len(x)
    own = {name: value.expand(count, *value.shape).contiguous() for name, value in start.items()}
    gradients = gradients_of_all(forward) if gradients is None else gradients
    client, losses = torch.arange(count)[:, None], []
    for step in range(batches.shape[1]):
        rows = batches[:, step]
        gradient, value = gradients(own, x[client, rows], y[client, rows])
        own = {name: value - rate * gradient[name] for name, value in own.items()}
        losses.append(value)
    return {name: (value - start[name]).mean(0) for name, value in own.items()}, float(torch.stack(losses).mean())


# -------------------------------------------------------------------------------------------- methods


def fedgwc_round(
    forward: Forward, start: Tensors, x: Any, y: Any, batches: Any, rate: float, threads: int
) -> tuple[Tensors, float]:
    """Averaging, and Gaussian rewards of the losses at every step folded into the interactions."""
    torch.set_num_threads(threads)
    total, table = {name: torch.zeros_like(value) for name, value in start.items()}, []
    for client in range(len(x)):
        change, own = train_client(forward, start, x[client], y[client], batches[client], rate)
        table.append(torch.stack(own))
        for name, value in change.items():
            total[name] += value / len(x)
    losses = torch.stack(table)
    spread = losses.var(0).clamp_min(1e-12)
    rewards = torch.exp(-((losses - losses.mean(0)) ** 2) / (2 * spread)).mean(1)
    interactions = torch.zeros(len(x), len(x))
    interactions = 0.9 * interactions + 0.1 * rewards[:, None]
    float(interactions.diff(dim=0).square().mean())
    return {name: value + total[name] for name, value in start.items()}, float(losses.mean())


def cfl_round(
    forward: Forward, start: Tensors, x: Any, y: Any, batches: Any, rate: float, threads: int
) -> tuple[Tensors, float]:
    """Averaging, and the criteria and cosine similarities of all updates."""
    torch.set_num_threads(threads)
    rows, losses = [], []
    for client in range(len(x)):
        change, own = train_client(forward, start, x[client], y[client], batches[client], rate)
        rows.append(torch.cat([value.flatten() for value in change.values()]))
        losses += own
    updates = torch.stack(rows)
    mean, norms = updates.mean(0), updates.norm(dim=1)
    criteria = float(mean.norm()) < float(norms.max())
    similarity = updates @ updates.T / (norms[:, None] * norms[None])
    assert criteria or float(similarity.min()) < 1
    pieces = mean.split([value.numel() for value in start.values()])
    moved = {name: value + piece.view_as(value) for (name, value), piece in zip(start.items(), pieces, strict=True)}
    return moved, float(torch.stack(losses).mean())


def ifca_round(
    forward: Forward, models: Sequence[Tensors], x: Any, y: Any, steps: int, rate: float, threads: int
) -> tuple[list[Tensors], float]:
    """Every client takes full-batch steps from the model of least loss; uniform mean per cluster."""
    torch.set_num_threads(threads)
    totals = [{name: torch.zeros_like(value) for name, value in model.items()} for model in models]
    counts, losses = [0] * len(models), []
    rows = [slice(None)] * steps
    for client in range(len(x)):
        images = x[client].float() / 255
        with torch.no_grad():
            scores = [float(F.cross_entropy(forward(model, images), y[client])) for model in models]
        slot = int(np.argmin(scores))
        change, own = train_client(forward, models[slot], x[client], y[client], rows, rate)
        losses += own
        counts[slot] += 1
        for name, value in change.items():
            totals[slot][name] += value
    moved = [
        {name: value + total[name] / max(count, 1) for name, value in model.items()}
        for model, total, count in zip(models, totals, counts, strict=True)
    ]
    return moved, float(torch.stack(losses).mean())
