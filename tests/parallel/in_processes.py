"""One of several processes: `python -m tests.parallel.in_processes JSON`, for the tests beside it.

Jobs are done one after the other; what the first process finds goes to FOLDER/JOB.npz, what goes wrong with a line to
FOLDER/refusals-ID.json.
"""

import inspect
import json
import pathlib
import sys
import time
import traceback

import jax
import numpy as np

import fedjax_cluster as fc
from fedjax_cluster import local, nn, parallel

CLIENTS, ROUNDS = 7, 3


FURTHER = {
    "churn": {"name": "ifca", "participation": 1.0, "churn": ((1, (6,), ()), (2, (), (0,)))},
    "timed": {"name": "cfl_gp", "participation": 0.6, "time_clustering": True, "eval_clients": 4},
}


def build(name, participation=1.0):
    factory = fc.algorithms.REGISTRY[name]
    clusters = {"clusters": 2} if "clusters" in inspect.signature(factory).parameters else {}
    own = local.sgd(0.2, batch_size=4, epochs=1)
    return factory(nn.mlp(hidden=(5,)), local=own, participation=participation, **clusters)


def federation(seed=0):
    from tests.federations import blobs

    return blobs(clients=CLIENTS, seed=seed)


def played(name, participation, data=None, **further):
    """What is compared of a run: labels, evaluation, and all that is kept of clusters and clients."""
    options = {"rounds": ROUNDS, "eval_every": 2, "progress": False, **further}
    result = fc.simulate(build(name, participation), federation() if data is None else data, **options)
    return what_is_compared(result)


def what_is_compared(result):
    state, count = parallel.fetched(result.state), len(result.federation.train.num_examples)
    found = {f"clusters{i}": leaf for i, leaf in enumerate(jax.tree.leaves(state.clusters))}
    found |= {f"clients{i}": leaf[:count] for i, leaf in enumerate(jax.tree.leaves(state.clients))}
    history = {name: result.history[name] for name in ("loss", "accuracy", "adjusted_rand_index", "num_clients")}
    return {"labels": result.labels, **found, **history}


def own_clients(count):
    """The clients whose rows lie on this process's devices."""
    devices = jax.devices()
    padded = -(-count // len(devices)) * len(devices)
    each = padded // len(devices)
    mine = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
    return {client for i in mine for client in range(i * each, (i + 1) * each) if client < count}


def refusals():
    """Runs that several processes cannot carry out together, and what each of them says."""
    first, said = parallel.is_first(), {}
    method, data = build("fedavg"), federation()
    few = fc.types.Federation(*(jax.tree.map(lambda leaf: leaf[:1], part) for part in data[:4]), data.info)
    cases = {
        "seed": ((method, data), {"seed": 0 if first else 1}),
        "federation": ((method, data if first else federation(seed=1)), {}),
        "method": ((method if first else build("fairavg"), data), {}),
        "rounds": ((method, data), {"rounds": 1 if first else 2}),
        "clients": ((method, few), {}),
        "mapping": ((method, data), {"mapping": parallel.client_mapping(devices=jax.devices()[:2])}),
        "run_dir": ((method, data), {"run_dir": None if first else "never made"}),
        "time_clustering": ((method, data), {"time_clustering": first}),
        "one alone": ((method, data), {"eval_every": 1 if first else 0}),
    }
    for name, (arguments, options) in cases.items():
        said[name] = refusal(*arguments, **{"rounds": 1, **options})
    return said


def refusal(*arguments, **options):
    try:
        fc.simulate(*arguments, progress=False, **options)
    except ValueError as error:
        return str(error)
    return None


def from_disk(folder, brought):
    """Each process reads the clients that its own devices have, and no others."""
    read, plain = set(), fc.data.stored.Files._read

    def noted(self, part, clients, wanted):
        read.update(int(client) for client in np.ravel(clients) if 0 <= client < CLIENTS)
        return plain(self, part, clients, wanted)

    fc.data.stored.Files._read = noted
    population = fc.data.open_population(folder)
    population = fc.data.on_devices(population) if brought else population
    found = played("fedavg", 1.0 if brought else 0.6, population)
    if brought:
        # The first client tells what shape rows have.
        assert own_clients(CLIENTS) <= read <= {0, *own_clients(CLIENTS)}, (read, own_clients(CLIENTS))
    fc.data.stored.Files._read = plain
    return found


def shards():
    """The rows of a population that lie on this process's devices are those of its own clients."""
    data = federation()
    population = parallel.place_population(data.train, data.info, parallel.client_mapping())
    held = {}
    for shard in population.data.x.addressable_shards:
        held |= {shard.index[0].start + i: row for i, row in enumerate(np.asarray(shard.data))}
    assert {client for client in held if client < CLIENTS} == own_clients(CLIENTS)
    for client in own_clients(CLIENTS):
        np.testing.assert_array_equal(held[client], data.train.x[client])
    return {"clients": np.asarray(sorted(held))}


def write_large(folder, clients=64, rows=1500, features=1024):
    """A population of 400 MB on disk; its bytes."""
    rng = np.random.default_rng(0)
    many = ((rng.normal(size=(rows, features)).astype(np.float32), np.arange(rows) % 3) for _ in range(clients))
    fc.data.write_population(folder, many, test_fraction=0.01)
    return clients * rows * features * 4


def memory(folder):
    """Bytes by which the process's greatest memory grew over a round of a large population."""
    method = fc.algorithms.fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=2))
    fc.simulate(method, federation(), rounds=1, progress=False)
    before = greatest_memory()
    fc.simulate(method, fc.data.on_devices(fc.data.open_population(folder / "population")), rounds=1, progress=False)
    return greatest_memory() - before


def greatest_memory():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def main(given):
    if given["count"] > 1:
        parallel.use_all_cores(given["devices"][given["id"]])
        address = f"localhost:{given['port']}"
        parallel.start_processes(address, given["count"], given["id"], start_seconds=60, lost_seconds=20)
    if given["devices"] == [2, 2]:
        import tests.conftest  # noqa: F401  quick compilation, which starts JAX

    folder = pathlib.Path(given["folder"])
    began = time.monotonic()
    for job in given["jobs"]:
        print(f"{time.monotonic() - began:.1f} s: {job}", flush=True)
        kind, _, rest = job.partition(" ")
        if kind == "method":
            name, participation, *rounds = rest.split()
            try:
                found = played(name, float(participation), rounds=int(*rounds or [ROUNDS]))
            except (TypeError, ValueError, RuntimeError):
                traceback.print_exc()  # a fault of one method, in both processes
                continue
        elif kind == "further":
            found = played(**FURTHER[rest])
        elif kind == "saved":
            found = played("fedavg", 0.6, rounds=int(rest), run_dir=folder / "run", checkpoint_every=0)
        elif kind == "disk":
            found = from_disk(folder / "population", rest == "brought")
        elif kind == "shards":
            found = shards()
        elif kind == "uneven":
            said = refusal(build("fedavg"), federation(), rounds=1)
            (folder / f"uneven-{given['id']}.json").write_text(json.dumps(said))
            continue
        elif kind == "memory":
            (folder / f"memory-{given['id']}.json").write_text(json.dumps(memory(folder)))
            continue
        else:
            (folder / f"refusals-{given['id']}.json").write_text(json.dumps(refusals()))
            continue
        if parallel.is_first():
            np.savez(folder / f"{job.replace(' ', '-')}.npz", **found)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
