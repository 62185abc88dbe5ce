"""Many runs from one compilation against the same runs one by one: `python -m benchmarks.many_runs`.

Seeds times learning rates of a method, by `simulate` one by one, each rate with its own program; by `simulate_many` in
turn, one program; and with `--together` side by side. Seconds of the rounds alone and of everything, with compilation,
in fresh caches; and processor seconds of everything, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np

import fedjax_cluster as fc

RATES = (0.03, 0.1, 0.2, 0.3)


def build(name: str, rate: float):
    """A method with a learning rate."""
    own = fc.local.sgd(rate, batch_size=32, steps=10)
    options = {"clusters": 4} if name != "fedavg" else {}
    return getattr(fc.algorithms, name)(fc.nn.mlp((64,)), local=own, **options)


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
        found["labels that differ"] = float((labels != first).sum())
    return found


def main() -> None:
    """Prints the seconds and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["fedavg", "ifca", "cfl_gp"])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
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
        print({key: round(value, 2) for key, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
