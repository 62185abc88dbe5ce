"""Many runs from one compilation against the same runs one by one: `python -m benchmarks.many_runs`.

Seeds times learning rates of a method, by `simulate` one by one, each rate with its own program; by `simulate_many` in
turn, one program; and with `--together` side by side. Seconds of the rounds alone and of everything, with compilation,
in fresh caches; and processor seconds of everything, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import inspect
import time

import jax
import numpy as np

import fedjax_cluster as fc

RATES = (0.03, 0.1, 0.2, 0.3)


def build(name: str, rate: float):
    """A method with a learning rate."""
    own = fc.local.sgd(rate, batch_size=32, steps=10)
    method = getattr(fc.algorithms, name)
    options = {"clusters": 4} if "clusters" in inspect.signature(method).parameters else {}
    return method(fc.nn.mlp((64,)), local=own, **options)


def measure(name: str, seeds: int, rounds: int, side_by_side: bool) -> dict[str, float]:
    """Seconds, of everything and of the rounds alone."""
    federation = fc.data.scenarios.rotated(fc.data.digits(), clients=32)
    options = {"rounds": rounds, "eval_every": rounds, "progress": False}
    found: dict[str, float] = {}
    first = None
    for kind in ("one by one", "in turn", *(["together"] if side_by_side else [])):
        jax.clear_caches()
        started, processor = time.perf_counter(), time.process_time()
        if kind == "one by one":
            results = [
                fc.simulate(build(name, rate), federation, seed=seed, **options)
                for rate in RATES
                for seed in range(seeds)
            ]
        else:
            values = {"learning_rate": RATES}
            together = kind == "together"
            results = fc.simulate_many(
                build(name, RATES[0]), federation, seeds=range(seeds), options=values, together=together, **options
            )
        found[f"{kind}: all"] = time.perf_counter() - started
        found[f"{kind}: processor"] = time.process_time() - processor
        found[f"{kind}: rounds"] = float(np.sum([result.summary["run_seconds"] for result in results]))
        labels = np.stack([result.labels for result in results])
        first = labels if first is None else first
        found["labels that differ"] = found.get("labels that differ", 0.0) + float((labels != first).sum())
    return found


def alternating(name: str, pairs: int, rounds: int) -> tuple[float, float]:
    """The rounds with a rate that is an argument over those with a constant, both compiled: the medians of the ratios
    of seconds and of processor seconds, of runs in turns."""
    federation = fc.data.scenarios.rotated(fc.data.digits(), clients=32)
    canonical, method = {"local.learning_rate": RATES[0]}, build(name, RATES[1])
    ratios = []
    for pair in range(pairs + 1):
        spent = []
        for numbers in ({}, canonical):
            with fc.lifting.one_program(numbers):
                processor = time.process_time()
                result = fc.simulate(method, federation, rounds=rounds, seed=pair, eval_every=rounds, progress=False)
                spent.append((result.summary["run_seconds"], time.process_time() - processor))
        ratios += [np.divide(spent[1], spent[0])] if pair else []  # the first compiles
    wall, processor = np.median(ratios, axis=0)
    return float(wall), float(processor)


def main() -> None:
    """Prints the seconds and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["fedavg", "ifca", "cfl_gp"])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=8, help="runs of each kind, in turns, once both are compiled")
    parser.add_argument("--together", action="store_true")
    own = parser.parse_args()
    fc.parallel.use_all_cores()
    print(f"{own.seeds} seeds × {len(RATES)} rates × {own.rounds} rounds on {jax.devices()[0].device_kind}")
    for name in own.methods:
        found = measure(name, own.seeds, own.rounds, own.together)
        for kind in ("in turn", "together"):
            if f"{kind}: all" in found:
                parts = {"rounds": "seconds of the rounds", "all": "of everything", "processor": "processor seconds"}
                ratios = [found[f"{kind}: {part}"] / found[f"one by one: {part}"] for part in parts]
                told = (f"{ratio:.2f} × {what}" for ratio, what in zip(ratios, parts.values(), strict=True))
                print(f"{name}, {kind}: {', '.join(told)}")
        wall, processor = alternating(name, own.pairs, 4 * own.rounds)
        print(f"{name}, rounds in turns, compiled: {wall:.3f} × seconds, {processor:.3f} × processor seconds")
        print({key: round(value, 2) for key, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
