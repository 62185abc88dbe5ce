"""Models as safetensors files, which many programs read."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_cluster.files import atomic_file
from fedjax_cluster.types import State, Variables

OURS = re.compile(r"(cluster|client)\d+\.safetensors")


def check_folder(folder: pathlib.Path, clusters: Iterable[int], clients: int) -> None:
    """Raises a ValueError where models cannot be written, or those of other clusters and clients would stay by them."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder for the models")
    own = {f"cluster{slot}.safetensors" for slot in map(int, clusters)}
    own |= {f"client{client}.safetensors" for client in range(clients)}
    there = (file.name for file in folder.glob("*.safetensors") if OURS.fullmatch(file.name))
    if others := sorted(set(there) - own):
        raise ValueError(f"{folder} holds {others[0]}, which would stay by them: give another folder, or empty it")


def save_clusters(
    folder: pathlib.Path, state: State, clusters: Iterable[int], told: Mapping[str, str]
) -> list[pathlib.Path]:
    """The models of clusters, a file each; `told` goes into the files' metadata."""
    files = []
    for slot in map(int, clusters):
        own = {"params": state.clusters.params, "stats": state.clusters.stats}
        variables = jax.tree.map(lambda leaf, row=slot: np.asarray(leaf[row]), own)
        files.append(_save(folder / f"cluster{slot}.safetensors", variables, {**told, "cluster": str(slot)}))
    return files


def save_client(
    folder: pathlib.Path, client: int, variables: Variables, mixture: Any, told: Mapping[str, str]
) -> pathlib.Path:
    """The personal models of a client, leaves [P, ...], and their weights f32[P]."""
    content = {"params": variables.params, "stats": variables.stats, "mixture": mixture}
    return _save(folder / f"client{client}.safetensors", content, {**told, "client": str(client)})


def _save(path: pathlib.Path, content: Any, told: Mapping[str, str]) -> pathlib.Path:
    from safetensors.numpy import save_file  # on its first use

    leaves = jax.tree_util.tree_flatten_with_path(content)[0]
    arrays = {
        jax.tree_util.keystr(place, simple=True, separator="/"): np.asarray(leaf, order="C") for place, leaf in leaves
    }
    for place, _ in leaves:
        if any("/" in jax.tree_util.keystr((part,), simple=True) for part in place):
            name = jax.tree_util.keystr(place, simple=True, separator=" → ")
            raise ValueError(
                f"the parameter {name} has a / in a name, which files take for a branch; name it otherwise"
            )
    with atomic_file(path) as beside:
        save_file(arrays, beside, metadata=dict(told))
    return path
