"""What a benchmark counts and how its results are shown; the rates themselves are measured, not tested."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from jax import lax

from benchmarks import on_disk, readme_tables
from benchmarks.peers import __main__ as peers
from benchmarks.peers import published
from fedjax_cluster import bench, cli, nn
from fedjax_cluster.bench import convolution, measure, tables, workloads
from fedjax_cluster.bench.measure import Row, in_turns
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.types import DatasetInfo

IMAGES = DatasetInfo("images", (28, 28), 10)


def test_flops_of_a_gradient_are_those_of_the_direct_algorithms():
    # Forward 2, backward 4 FLOPs per weight and example; no gradient is taken of the input.
    assert gradient_flops(nn.mlp(), IMAGES, 64) == 64 * (6 * (784 * 200 + 200 * 10) - 2 * 784 * 200)
    first = 2 * 32 * 28 * 28 * 25 * 32
    others = 2 * 32 * (14 * 14 * 25 * 32 * 64 + 3136 * 512 + 512 * 10)
    assert gradient_flops(nn.cnn(), IMAGES, 32) == 2 * first + 3 * others


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_flops_of_convolutions_that_are_flax_modules(groups):
    """They counted nothing; nor did models with dropout, which failed."""

    class small(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            x = linen.Conv(6, (3, 3))(x)
            x = linen.Conv(12, (3, 3), (2, 2), feature_group_count=groups)(x)
            x = linen.Dropout(0.5, deterministic=not train)(x)
            return linen.Dense(10)(x.mean((1, 2)))

    info = DatasetInfo("images", (8, 8, 3), 10)
    first, second, dense = 8 * 8 * 9 * 3 * 6, 4 * 4 * 9 * 6 // groups * 12, 12 * 10
    assert gradient_flops(nn.from_flax(small()), info, 5) == 5 * 2 * (2 * first + 3 * second + 3 * dense)


def test_flops_of_a_program_with_branches_are_those_of_the_largest():
    own = nn.linear()
    branched = own._replace(
        loss=lambda outputs, y: own.loss(lax.cond(y.sum() > 3, lambda of: of @ of.T @ of, lambda of: of, outputs), y)
    )
    info = DatasetInfo("digits", (8, 8), 10)
    square = 3 * (10 * 10 * 10)
    assert gradient_flops(branched, info, 10) >= gradient_flops(own, info, 10) + 2 * 2 * square


def test_flops_of_a_recurrence_are_counted_for_every_step():
    def flops(tokens):
        return gradient_flops(nn.lstm((8,), embedding=4), DatasetInfo("text", (tokens,), 20, "language"), 2)

    assert flops(10) == 2 * flops(5)


def test_runs_take_turns():
    order = []
    in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3


def test_a_turn_lasts_long_enough_for_threads_to_have_woken(monkeypatch):
    """A clock that a run of "a" moves on by 0.1 s and one of "b" by 1 s."""
    now, order = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def run(name, seconds):
        order.append(name)
        now[0] += seconds

    found = in_turns({"a": lambda: run("a", 0.1), "b": lambda: run("b", 1.0)}, 3, shortest=0.25)
    assert order == [*"aaab"] * 4
    assert found["a"].wall == pytest.approx(0.1)
    assert found["b"].wall == pytest.approx(1.0)


def report(**changes):
    row = {"what": "product", "size": "M=8", "seconds": 0.5, "flops": 1e9, "fraction": 0.7, "at_least": 0.65}
    blank = {name: getattr(Row("", ""), name) for name in Row.__dataclass_fields__}
    blank = {name: None if value != value else value for name, value in blank.items()}
    return {
        "suite": "local",
        "processor": "CPU",
        "cores": 2,
        "device": "2 × cpu",
        "backend": "cpu",
        "versions": {"jax": "0.10"},
        "product_gflop_per_second": 100.0,
        "rows": [{**blank, **row, **changes}],
    }


def test_a_readme_gets_its_tables_between_its_marks_and_keeps_the_rest(tmp_path):
    (tmp_path / "local-cpu.json").write_text(json.dumps(report()))
    readme = tmp_path / "README.md"
    (tmp_path / "others.json").write_text("{}")
    readme.write_text(f"before\n{readme_tables.BEGIN}\nold\n{readme_tables.END}\nafter\n")
    for _ in range(2):
        readme_tables.write_between_marks(readme_tables.all_tables(readme_tables.read_results(tmp_path)), readme)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{readme_tables.END}\nafter\n")
    assert "old" not in text
    assert text.count("| product | M=8 | 0.5 | 2 | 0.70 | 0.65 met |") == 1


def test_a_missed_target_is_marked():
    assert "0.65 missed" in tables.as_text(report(fraction=0.6))
    assert "2.5 missed" in tables.as_text(report(ratio=2.0, peer="loop", at_least=2.5))


def test_a_readme_without_marks_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(ValueError, match="no lines"):
        readme_tables.write_between_marks("a table", tmp_path / "README.md")


def test_the_readmes_hold_the_tables_of_the_results():
    root = pathlib.Path(__file__).parents[2]
    reports = readme_tables.read_results(root / "benchmarks" / "results")
    assert f"\n\n{readme_tables.all_tables(reports)}\n\n" in (root / "benchmarks" / "README.md").read_text()
    assert f"\n\n{readme_tables.headline_table(reports)}\n\n" in (root / "README.md").read_text()
    with pytest.raises(ValueError, match="have no row 'CFL-GP on mnist, whole process'"):
        readme_tables.headline_table([report()])


def test_every_suite_that_is_named_is_a_module():
    for package, suites in (("fedjax_cluster.bench", bench.SUITES), ("benchmarks.peers", peers.SUITES)):
        assert all(importlib.util.find_spec(f"{package}.{name}") for name in suites)


def test_the_network_of_pfls_benchmark_has_its_parameters():
    """Which pfl prints; with pooling at stride 1, Flax's, there were four times as many."""
    params = jax.eval_shape(lambda key: published.network().init(key, workloads.CIFAR), jax.random.key(0)).params
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 1_626_442


def test_an_unknown_suite_is_refused():
    with pytest.raises(ValueError, match="unknown suite 'velocity'"):
        bench.run_suites(["local", "velocity"])


def test_a_suite_that_ends_early_leaves_its_rows(tmp_path, monkeypatch, capsys):
    """Beside the results of before; a limit of time on a machine that was lent took all."""

    def cut_off(bench):
        bench.add(Row("first", "", 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_cluster.bench.local.run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        bench.run_suites(["local"], output=tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name == "local-cpu-unfinished.json"
    assert [row["what"] for row in json.loads(left.read_text())["rows"]] == ["first"]
    assert f"the rows so far are in {left}" in capsys.readouterr().err
    # Those of a later run that ended are all, and no tiny sizes stand in their place.
    monkeypatch.setattr("fedjax_cluster.bench.local.run", lambda bench: bench.add(Row("first", "", 1.0)))
    bench.run_suites(["local"], smoke=True, output=tmp_path)
    bench.run_suites(["local"], output=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local-cpu-smoke.json", "local-cpu.json"]
    assert [report["smoke"] for report in readme_tables.read_results(tmp_path)] == [False]


@pytest.mark.slow
def test_the_command_leaves_its_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    assert cli.main(["bench", "local", "--smoke", "--output", str(tmp_path)]) == 0
    with (tmp_path / "local-cpu-smoke.json").open() as file:
        content = json.load(file)
    assert {row["what"] for row in content["rows"]} == {
        "MLP, local training",
        "LSTM, local training",
        "MLP, local training in bfloat16",
    }
    assert all(row["seconds"] > 0 and row["fraction"] > 0 for row in content["rows"])
    assert content["processor"] in capsys.readouterr().out


def test_populations_on_disk_are_summed_up_for_each_method_by_its_own_fewest():
    """As where one method was measured with further numbers of clients."""
    rows = json.loads(on_disk.RESULTS.read_text())["rows"]
    found = on_disk.summary([*rows, {**rows[0], "clients": 1000}])
    ratios = {(row["method"], row["clients"]): row["seconds_a_round to the fewest"] for row in found}
    assert ratios[rows[0]["method"], 1000] == ratios["ifca", 10_000] == 1
    assert ratios["ifca", 1_000_000] == pytest.approx(0.86, abs=0.01)


def test_convolutions_are_timed_on_any_number_of_devices():
    """As many of them as divide the clients."""
    double = convolution.one_by_one(lambda x: 2 * x)
    for clients in (4, 3):
        assert double(jnp.ones((clients, 2))).tolist() == [[2.0, 2.0]] * clients
