"""How well clusterings by landmark clients do: error against clients and landmarks, and 100 000 clients in memory.

    python -m benchmarks.landmarks [--clients 500 2000] [--landmarks 16 64 256] [--large 100000]

The first part clusters the same synthetic numbers exactly and by landmarks, as the methods do: CFL-GP's profiles,
FedGWC's interactions, what FLAG's clients send. The second runs whole methods on resident clients who all take part in
every round, each run in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_cluster as fc
from benchmarks import on_disk
from benchmarks.on_disk import CLASSES, FEATURES, GROUPS, publish
from fedjax_cluster import clustering, tree
from fedjax_cluster.algorithms.cfl_gp import landmarks as by_landmarks
from fedjax_cluster.algorithms.cfl_gp import profiles
from fedjax_cluster.algorithms.fedgwc import weighting
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.bench.measure import machine, run_python
from fedjax_cluster.bench.scale import peak_megabytes
from fedjax_cluster.files import write_json
from fedjax_cluster.types import ONE_DEVICE, ClientData, DatasetInfo, Federation

ROWS = on_disk.TRAIN
SEEDS = 3
RESULTS = pathlib.Path(__file__).parent / "results" / "landmarks-cpu.json"
LARGE = {
    "CFL-GP, exact": ("cfl_gp", {}),
    "CFL-GP, 64 landmarks": ("cfl_gp", {"landmarks": 64}),
    "CFL-GP, 256 landmarks": ("cfl_gp", {"landmarks": 256}),
    "FLAG, 256 landmarks": ("flag", {"landmarks": 256}),
    "FedGWC, 64 landmarks": ("fedgwc", {"landmarks": 64}),
}


# ------------------------------------------------------------------------------------------ errors


def of_cfl_gp(clients: int, seed: int) -> Callable[[int | None], Any]:
    """Four blocks of 66 coordinates, in which a group's mean is a quarter of a client's noise."""
    rng = np.random.default_rng(seed)
    group = np.arange(clients) % GROUPS
    means = rng.standard_normal((GROUPS, GROUPS, 66)).astype(np.float32)
    profile = 0.25 * means[group] + rng.standard_normal((clients, GROUPS, 66), np.float32)
    old = jax.nn.one_hot(group, GROUPS)
    given = profiles.Clients(old, jnp.ones(clients, bool), jnp.asarray(profile), jnp.ones((clients, GROUPS), jnp.int32))

    @functools.partial(jax.jit, static_argnames="number")
    def cluster(rows: profiles.Clients, number: int | None) -> Any:
        key = jax.random.key(seed)
        if number is None:
            features, _ = profiles.embed(key, rows, jnp.zeros((GROUPS, 0, 0)), rows.present, GROUPS)
            return clustering.kmeans(key, features, GROUPS).labels
        chosen = clustering.draw_landmarks(key, number, rows.present)
        index = jnp.arange(clients, dtype=jnp.int32)
        before = labels(rows.membership)
        found = by_landmarks.grouped(key, tree.take(rows, chosen), ONE_DEVICE)
        near = by_landmarks.nearest_group(found.groups, rows.profile, rows.updates, before)
        return by_landmarks.placed(found, chosen, index, before, near)

    return functools.partial(cluster, given)


def of_fedgwc(clients: int, seed: int) -> Callable[[int | None], Any]:
    """Interactions that are 0.1 larger within a group, with noise of 0.3."""
    rng = np.random.default_rng(seed)
    group = np.arange(clients) % GROUPS
    matrix = 0.5 + 0.1 * (group[:, None] == group[None]) + 0.3 * rng.standard_normal((clients, clients), np.float32)
    given = jnp.asarray(matrix, jnp.float32)
    beta = 5.0 / clients
    numbers = jnp.asarray(GROUPS), jnp.asarray(GROUPS)

    @functools.partial(jax.jit, static_argnames="number")
    def cluster(matrix: jax.Array, number: int | None) -> Any:
        key = jax.random.key(seed)
        everybody = jnp.ones(clients, bool)
        if number is None:
            graph = clustering.interaction_affinity(matrix, beta)
            return weighting.partition(key, graph, everybody, *numbers, 3, max_children=GROUPS).labels
        chosen = clustering.draw_landmarks(key, number, everybody)
        square = matrix[chosen][:, chosen]
        scale = (clients - 2) / max(number - 2, 1)
        graph = clustering.interaction_affinity(square, beta * scale)
        found = weighting.partition(key, graph, jnp.ones(number, bool), *numbers, 3, max_children=GROUPS)
        near = clustering.landmark_affinity(matrix[:, chosen], chosen, beta)
        return clustering.extend_labels(1.0 - near, chosen, found.labels, GROUPS)

    return functools.partial(cluster, given)


def of_flag(clients: int, seed: int) -> Callable[[int | None], Any]:
    """Directions of four classes and changes, each group's own, with noise; cut where four clusters are left."""
    rng = np.random.default_rng(seed)
    group = np.arange(clients) % GROUPS
    means = rng.standard_normal((GROUPS, GROUPS, FEATURES))
    noisy = means[group] + 0.9 * rng.standard_normal((clients, GROUPS, FEATURES))
    vectors = (noisy / np.linalg.norm(noisy, axis=-1, keepdims=True)).astype(np.float32)[..., None]
    counts = rng.integers(3, 9, (clients, GROUPS)).astype(np.int32)
    updates = rng.standard_normal((GROUPS, 66))[group] + 1.5 * rng.standard_normal((clients, 66))
    updates = updates.astype(np.float32)

    def cluster(number: int | None) -> Any:
        chosen = np.arange(clients)
        if number is not None:
            chosen = np.asarray(clustering.draw_landmarks(jax.random.key(seed), number, np.ones(clients, bool)))
        by_class = clustering.classwise_angles(vectors[chosen], counts[chosen])
        data = clustering.data_dissimilarity(by_class, counts[chosen])
        between = clustering.proximity(data, clustering.gradient_angles(updates[chosen]))
        label = clustering.agglomerative(between, num_clusters=GROUPS)
        if number is None:
            return label
        near = clustering.landmark_proximity(vectors, counts, updates, chosen)
        return clustering.extend_labels(near, chosen, label, GROUPS)

    return cluster


METHODS = {"CFL-GP": of_cfl_gp, "FedGWC": of_fedgwc, "FLAG": of_flag}


def timed(cluster: Callable[[int | None], Any], number: int | None) -> tuple[np.ndarray, float]:
    """Labels, and the seconds of the second of two calls: the first compiles."""
    jax.block_until_ready(cluster(number))
    started = time.perf_counter()
    found = np.asarray(jax.block_until_ready(cluster(number)))
    return found, time.perf_counter() - started


def errors(clients: int, numbers: list[int]) -> list[dict[str, Any]]:
    """For each method and number of landmarks: agreement with the exact clustering and the groups, means over seeds."""
    rows = []
    for name, prepare in METHODS.items():
        found: dict[int | None, list[tuple[float, ...]]] = {}
        for seed in range(SEEDS):
            cluster, group = prepare(clients, seed), np.arange(clients) % GROUPS
            exact, _ = timed(cluster, None)
            for number in (None, *(number for number in numbers if number <= clients)):
                label, seconds = timed(cluster, number)
                agreement = [float(clustering.scores.adjusted_rand_index(label, other)) for other in (exact, group)]
                found.setdefault(number, []).append((*agreement, seconds))
        for number, several in found.items():
            with_exact, with_groups, seconds = np.mean(several, 0).tolist()
            row = {"method": name, "clients": clients, "landmarks": number, "with_exact": with_exact}
            rows.append({**row, "with_groups": with_groups, "seconds": seconds})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


# ------------------------------------------------------------------------------------------ whole runs


def federation(clients: int, hard: bool) -> Federation:
    """Each group labels its inputs by a plane of its own; where some are `hard`, the clients of `on_disk` in memory."""
    rng = np.random.default_rng(1)
    means = np.random.default_rng(0).standard_normal((CLASSES if hard else GROUPS, FEATURES)).astype(np.float32)
    group = on_disk.groups(np.arange(clients), hard).astype(np.int32)

    def draw(rows: int) -> ClientData:
        if hard:
            x, y = on_disk.drawn(rng, means, group, rows, hard)
        else:
            x = rng.standard_normal((clients, rows, FEATURES), np.float32)
            y = (np.einsum("crf,cf->cr", x, means[group]) > 0).astype(np.int32)
        return ClientData(x, y, np.full(clients, rows, np.int32))

    info = DatasetInfo("classes", (FEATURES,), CLASSES) if hard else DatasetInfo("planes", (FEATURES,), 2)
    return Federation(draw(ROWS), draw(5), None, group, info)


def large(name: str, clients: str) -> dict[str, Any]:
    """A run on so many resident clients, in this process."""
    method, options = LARGE[name]
    update = fc.local.sgd(0.5, batch_size=ROWS, steps=2 if method == "fedgwc" else 5)
    own: dict[str, Any] = {
        "cfl_gp": {"clusters": GROUPS},
        # The inputs of all groups are alike: only the changes tell them apart.
        "flag": {"clusters": 2 * GROUPS, "beta": 0.0, "gradient_epochs": 5, "threshold": 0.45, "newcomers": False},
        # All are in everybody's company alike: clients are told apart by how much they are rewarded.
        "fedgwc": {
            **{"clusters": 2, "participation": 1.0, "centre": False},
            **{"max_children": 2, "tolerance": 1e-2, "beta": 20 / int(clients), "patience": 8},
        },
    }[method]
    algorithm = fc.algorithms.REGISTRY[method](fc.nn.linear(), local=update, **own, **options)
    started = time.perf_counter()
    rounds = 12
    data = federation(int(clients), hard=method == "fedgwc")
    result = fc.simulate(algorithm, data, rounds=rounds, eval_every=rounds, eval_clients=2000, progress=False)
    return {
        "method": name,
        "clients": int(clients),
        "rounds": rounds,
        "seconds_a_round": float(np.median(result.history["seconds"][1:])),
        "seconds": time.perf_counter() - started,
        "peak_megabytes": peak_megabytes(),
        "adjusted_rand_index": result.summary["adjusted_rand_index"],
        "accuracy": result.summary["accuracy"],
    }


# ------------------------------------------------------------------------------------------ tables


def tables(report: dict[str, Any]) -> str:
    """The two tables, as Markdown."""
    numbers = list(dict.fromkeys(row["landmarks"] for row in report["errors"] if row["landmarks"]))
    lines = [
        "| method | clients | exact: groups, seconds | " + " | ".join(f"m = {number}" for number in numbers) + " |",
        "|---|---:|---" + "|---" * len(numbers) + "|",
    ]
    cells: dict[tuple[str, int], dict[Any, Any]] = {}
    for row in report["errors"]:
        cells.setdefault((row["method"], row["clients"]), {})[row["landmarks"]] = row
    for (method, clients), found in cells.items():
        exact = found[None]
        parts = [f"{exact['with_groups']:.3f}, {exact['seconds']:.2g}"]
        for number in numbers:
            row = found.get(number)
            text = "" if row is None else f"{row['with_exact']:.3f} / {row['with_groups']:.3f}, {row['seconds']:.2g}"
            parts.append(text)
        lines.append(f"| {method} | {clients} | " + " | ".join(parts) + " |")
    lines += [
        "",
        "| run | clients | seconds a round | everything, seconds | peak memory, MB | ARI | accuracy |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["runs"]:
        numbers_ = f"{row['seconds_a_round']:.3g} | {row['seconds']:.0f} | {row['peak_megabytes']:.0f}"
        scores = f"{row['adjusted_rand_index']:.3f} | {row['accuracy']:.3f}"
        lines.append(f"| {row['method']} | {row['clients']} | {numbers_} | {scores} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="*", default=[500, 2000])
    parser.add_argument("--landmarks", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--large", type=int, default=100_000, help="resident clients of the second part; 0 for none")
    parser.add_argument("--runs", nargs="*", default=list(LARGE), help="of the second part")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only writes the tables from the results")
    parser.add_argument("--alone", nargs=2, help="one run of the second part, in this process")
    given = parser.parse_args()
    if not given.table:
        fc.parallel.use_all_cores()  # before the first computation
    if given.alone:
        print(json.dumps(large(*given.alone)))
        return
    if not given.table:
        found = [row for clients in given.clients for row in errors(clients, given.landmarks)]
        before = json.loads(given.output.read_text(encoding="utf-8"))["runs"] if given.output.exists() else []
        runs = {(run["method"], run["clients"]): run for run in before}
        report = {**machine(), "seeds": SEEDS, "errors": found, "runs": list(runs.values())}
        write_json(given.output, report)
        for name in given.runs if given.large else ():
            run = run_python("-m", "benchmarks.landmarks", "--alone", name, given.large, timeout=7200)
            print(json.dumps(run), file=sys.stderr, flush=True)
            runs[run["method"], run["clients"]] = {**run, **machine()}
            report["runs"] = list(runs.values())
            write_json(given.output, report)
    publish("landmarks", tables(json.loads(given.output.read_text(encoding="utf-8"))), given.output, RESULTS)


if __name__ == "__main__":
    main()
