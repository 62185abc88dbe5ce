"""Settings from files that people edit: what flags come before, and what is told of a mistake."""

import json
import pathlib

import pytest

from fedjax_cluster import RunConfig, cli
from fedjax_cluster.experiments import config_files, flags
from fedjax_cluster.files import sealed, write_json

pytestmark = pytest.mark.usefixtures("here")


def left(config, version=3, **more):
    """The config.json of a run."""
    identity = {"algorithm": config.method, "seed": config.seed}
    content = {"version": version, "identity": identity, "experiment": config.to_json(), "versions": {}, "machine": {}}
    write_json(path := pathlib.Path("config.json"), sealed({**content, **more}))
    return path


def parsed(line, method=None):
    return flags.parse_run(method, [*line.split()], "run")[0]


def yaml(text, name="run.yaml"):
    (path := pathlib.Path(name)).write_text(text)
    return path


def test_the_config_that_a_run_left_is_that_run_and_an_edited_one_the_edited_run():
    given = RunConfig(
        method="ifca", scenario="label_swap", local_epochs=2, clients=8, method_options={"score_on": "batch"}, seed=7
    )
    path = left(given)
    assert parsed("--config config.json") == config_files.run_config(path) == given
    path.write_text(path.read_text().replace('"rounds": 100', '"rounds": 12'))
    assert config_files.run_config(path).rounds == 12
    churned = RunConfig(method="fedavg", clients=8, churn=[[3, [1], []]])
    assert config_files.run_config(left(churned)) == churned


@pytest.mark.parametrize(
    ("scenario", "options"),
    [("rotated", {"alpha": float("inf")}), ("heterogeneity_levels", {"alphas": [0.1, float("inf")]})],
)
def test_infinity_is_there_again(scenario, options):
    """JSON has none; as null it was another experiment, or none."""
    given = RunConfig(method="ifca", scenario=scenario, clients=8, scenario_options=options)
    assert config_files.run_config(left(given)).scenario_options == given.scenario_options
    read = json.loads(pathlib.Path("config.json").read_text())["experiment"]
    assert RunConfig.from_json(read).scenario_options == given.scenario_options


def test_flags_come_before_the_file_and_defaults_after_it():
    left(RunConfig(method="ifca", learning_rate=0.25, local_steps=4, model="cnn", model_options={"channels": [4, 8]}))
    config = parsed("--config config.json --rounds 9 --learning-rate 0.5")
    assert (config.method, config.rounds, config.learning_rate, config.local_steps) == ("ifca", 9, 0.5, 4)
    assert config.model_options == {"channels": [4, 8]}
    # A default that is given as a flag is given.
    assert parsed("--config config.json --scenario rotated --batch-size 64 --seed 0").seed == 0
    # What goes with the other choice alone gives way.
    config = parsed("--config config.json --local-epochs 1")
    assert (config.local_steps, config.local_epochs) == (None, 1)
    config = parsed("--config config.json --averaging gradients")
    assert (config.averaging, config.local_steps) == ("gradients", None)
    config = parsed("--config config.json --averaging models")
    assert (config.averaging, config.local_steps) == ("models", 4)
    assert parsed("--config config.json --model mlp").model_options == {}
    assert parsed("--config=config.json", "fedavg").method == "fedavg"
    path = yaml("method: cfl-gp\nmethod_options: {every: 3, decimals: 5}\n")
    assert parsed(f"--config {path} --every 4").method_options == {"every": 4, "decimals": 5}


def test_what_yaml_merges_in_gives_way():
    yaml("method_options:\n  <<: {every: 2, beta: 0.3}\n  every: 3\n")
    assert parsed("--config run.yaml", "cfl_gp").method_options == {"every": 3, "beta": 0.3}


def test_an_edited_file_tells_of_no_tuning():
    """Fault: a report said how a rate had been chosen that a person had written down."""
    path = left(RunConfig(method="ifca", learning_rate=0.3, tuning={"figures": {"0.1": 0.2, "0.3": 0.5}}))
    assert config_files.run_config(path).tuning["figures"]["0.3"] == 0.5
    path.write_text(path.read_text().replace('"learning_rate": 0.3', '"learning_rate": 0.1'))
    assert (config_files.run_config(path).tuning, config_files.run_config(path).learning_rate) == ({}, 0.1)
    # Nor is it said of others that are compared with the method.
    left(RunConfig(method="ifca", learning_rate=0.3, tuning={"figures": {"0.3": 0.5}}))
    found = flags.parse_compare(["ifca", "fedavg"], ["--config", "config.json"], "compare")[0]
    assert [(config.learning_rate, bool(config.tuning)) for config in found.values()] == [(0.3, True), (0.3, False)]
    yaml("tuning: {a: b}")
    assert parsed("--config run.yaml").tuning == {}


def test_yaml_has_numbers_as_people_write_them():
    yaml("learning_rate: 1e-3\nclusters: auto\nscenario_options:\n  angles: [0, 90]\nclients: 8\n")
    config = parsed("--config run.yaml")
    assert (config.learning_rate, config.clusters, config.scenario_options) == (0.001, "auto", {"angles": [0, 90]})


def test_a_comparison_gives_each_method_the_options_that_it_has():
    yaml("rounds: 7\nlearning_rate: 0.2\nmethod_options: {every: 3}\n")
    words = ["--config", "run.yaml", "--defaults-of", "fedavg"]
    configs, _ = flags.parse_compare(["cfl-gp", "ifca"], words, "compare")
    assert [config.method_options for config in configs.values()] == [{"every": 3}, {}]
    assert {(config.rounds, config.learning_rate, config.local_steps) for config in configs.values()} == {(7, 0.2, 10)}
    with pytest.raises(ValueError, match=r"method_options\.every: none of ifca, fedavg has such an option"):
        flags.parse_compare(["ifca", "fedavg"], words, "compare")
    # What the file says is not undone by the averaging of those defaults.
    yaml("local_steps: 7\n", "steps.yaml")
    words = ["--config", "steps.yaml", "--defaults-of", "fedavg"]
    assert flags.parse_compare(["ifca", "flag"], words, "compare")[0]["flag"].local_steps == 7
    # A run's file has its method's own defaults, which are no other's.
    left(RunConfig(method="cfl_gp", method_options={"weighting": "uniform", "every": 3}))
    configs, _ = flags.parse_compare(["cfl-gp", "fedavg"], ["--config", "config.json"], "compare")
    assert [config.method_options for config in configs.values()] == [{"weighting": "uniform", "every": 3}, {}]
    # Those of a run's method that is not compared are not meant.
    left(RunConfig(method="cfl_gp", method_options={"every": 3}))
    assert flags.parse_compare(["ifca"], ["--config", "config.json"], "compare")[0]["ifca"].method_options == {}


def test_a_sweep_takes_lists_from_the_file():
    yaml("method: cfl-gp\nlearning_rate: [0.1, 1]\nrounds: 5\nmethod_options: {every: [1, 2]}\nclients: 8\n")
    cells, _ = flags.parse_sweep(None, ["--config", "run.yaml", "--rounds", "6"], "sweep")
    assert list(cells) == [f"learning rate {rate}, every {every}" for rate in ("0.1", "1") for every in (1, 2)]
    assert {cell.config.rounds for cell in cells.values()} == {6}
    assert cells["learning rate 1, every 2"].config.method_options["every"] == 2
    cells, _ = flags.parse_sweep(None, ["--config", "run.yaml", "--every", "4"], "sweep")
    assert list(cells) == ["learning rate 0.1", "learning rate 1"]
    assert cells["learning rate 1"].config.method_options["every"] == 4
    assert cli.main(["run", "--config", "run.yaml"]) == 2
    # Options of another method than the typed one are left out, as they are for a run.
    assert list(flags.parse_sweep("ifca", ["--config", "run.yaml"], "sweep")[0]) == list(cells)


def test_a_sweep_takes_lists_of_options_from_a_file_that_names_no_method():
    """Fault: below method_options a list was one value where the method stood on the command line alone."""
    yaml("method_options: {proximal: [0.1, 1]}\nclients: 8\n")
    cells, _ = flags.parse_sweep("fedprox", ["--config", "run.yaml", "--learning-rate", "0.1", "1"], "sweep")
    assert list(cells)[-1] == "learning rate 1, proximal 1"
    assert [cell.config.method_options for cell in cells.values()] == 2 * [{"proximal": 0.1}, {"proximal": 1.0}]
    # What is a list itself is swept by a list of lists.
    yaml("method_options: {shared_layers: [[hidden_0], [hidden_0, hidden_1]], start_rounds: [1, 2]}\n")
    cells, _ = flags.parse_sweep("ifca", ["--config", "run.yaml"], "sweep")
    assert [cell.config.method_options["shared_layers"] for cell in cells.values()][1:3] == [
        ["hidden_0"],
        ["hidden_0", "hidden_1"],
    ]
    yaml("method_options: {shared_layers: [hidden_0, hidden_1], start_rounds: [1, 2]}\n")
    cells, _ = flags.parse_sweep("ifca", ["--config", "run.yaml"], "sweep")
    assert list(cells) == ["start rounds 1", "start rounds 2"]
    yaml("method_options: {proximal: [0.1, x]}\n")
    with pytest.raises(ValueError, match=r"method_options\.proximal is 'x'; it must be a number.*\(in run\.yaml\)"):
        flags.parse_sweep("fedprox", ["--config", "run.yaml"], "sweep")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round: 5", "round is no setting; did you mean rounds? (in run.yaml)"),
        ("every: 2", "every is an option of the method; put it below method_options (in run.yaml)"),
        ("method: cfl-gp\nevery: 2", "every is an option of the method; put it below method_options (in run.yaml)"),
        ("rounds: 5.5", "rounds is 5.5; it must be a whole number, at least 1"),
        ("rounds: many", "rounds is 'many'; it must be"),
        ("seed:", "seed is None; it must be"),
        ("optimizer: rmsprop", "optimizer is 'rmsprop'; it must be 'sgd' or 'adam' (in run.yaml)"),
        ("method: fedavgg", "unknown method 'fedavgg'; did you mean fedavg?"),
        ("method: 3", "method is 3; it must be text (in run.yaml)"),
        ("method: ifca\nmethod_options: {every: 1}", "method_options.every: method ifca has no such option"),
        ("method: cfl-gp\nmethod_options: {every: x}", "method_options.every is 'x'; it must be a whole number"),
        ("scenario_options: {angles: 3}", "scenario_options.angles is 3; it must be a list of numbers"),
        ("method_options: 3", "method_options is 3"),
        ("version: 9\nrounds: 3", "config run.yaml is of version 9; this fedjax_cluster reads 1 to 4"),
        ("- rounds", "config run.yaml holds ['rounds']; it must hold settings by name"),
        ("", "config run.yaml holds nothing"),
        ("rounds: 3\nrounds: 4", "config run.yaml cannot be read in line 2: rounds stands there twice"),
        ("rounds: 1:30", "rounds is '1:30'"),  # was 90
        ("rounds: 010", "rounds is '010'"),  # was 8
        ("rounds: [", "config run.yaml cannot be read in line 1: expected"),
        ("method_options: {[1]: 2}", "config run.yaml cannot be read in line 1: found unhashable key"),
        ("rounds: 3\0", "config run.yaml cannot be read: unacceptable character #x0000: special characters"),
        ("&a\nmethod_options: *a", "config run.yaml cannot be read: Circular reference"),
        ("version: yes\nrounds: 3", "config run.yaml is of version True"),
        ("configs: {}", "config run.yaml is that of a comparison"),
        ("identity: {}\nexperiment: {}\nrounds: 3", "config run.yaml has the unknown key rounds"),
        ("identity: {}", "is that of a run of simulate(), which has no settings"),
        ("1: 2", "1 is no setting"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_key_and_file(text, message, capsys):
    yaml(text)
    assert cli.main(["run", "--config", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "run.yaml" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, "cannot read the config none.json: No such file"),
        ("run.toml", b"", "config is 'run.toml'; its name must end in .json, .yaml or .yml"),
        ("run.json", b"{", "config run.json cannot be read"),
        ("run.json", b'{"rounds": 1, "rounds": 2}', "rounds stands there twice"),
        ("run.json", b'\xef\xbb\xbf{"rounds": 0}', "rounds is 0"),  # as Windows' editors write it
        ("run.json", b"\xff", "cannot read the config run.json: it is no text"),
        ("run.json", b"[" * 100_000, "config run.json cannot be read"),
    ],
)
def test_what_is_no_such_file_is_one_line(name, content, message, capsys):
    if content is not None:
        pathlib.Path(name).write_bytes(content)
    assert cli.main(["compare", "fedavg", "--config", name]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_run_of_version_0_1_is_read():
    content = {"method": "fedavg", "membership": [[2, [1], []]], "clients": 4, "version": 1}
    pathlib.Path("old.json").write_text(json.dumps(content))
    assert config_files.run_config("old.json", rounds=3).churn[0].join == (1,)


@pytest.mark.parametrize(
    ("file", "changes", "kept"),
    [
        ({"averaging": "gradients"}, {"local_epochs": 1}, ()),
        ({"averaging": "gradients"}, {"local_epochs": 1, "learning_rate": 0.1}, ("learning_rate",)),
        ({"averaging": "gradients"}, {"averaging": "models"}, ()),
        ({"averaging": "models"}, {"averaging": "gradients"}, ()),
        ({"averaging": "gradients", "method": "fesem"}, {"local_epochs": 1}, ("learning_rate", "momentum")),
        ({"averaging": "gradients", "method": "local_only"}, {"local_steps": 5}, ("learning_rate", "momentum")),
        ({"averaging": "models"}, {"local_steps": 3}, ("learning_rate", "momentum")),
        ({}, {"local_steps": 3}, ("learning_rate", "momentum")),
        ({"averaging": "gradients"}, {"averaging": "gradients"}, ("learning_rate", "momentum")),
        ({}, {"optimizer": "adam"}, ("learning_rate",)),
    ],
)
def test_the_servers_rate_is_not_the_clients(file, changes, kept):
    """Clients trained at .3, the server's rate of the file, where a run without the file has .1."""
    found = config_files.overridden({**file, "learning_rate": 0.3, "momentum": 0.9}, changes)
    assert {"learning_rate", "momentum"} & found.keys() == set(kept)


def test_a_file_of_before_or_of_another_scenario_may_name_data_that_are_not_read(tmp_path):
    """A run of xor's config.json with a data set was refused, and no flag could take it out."""
    write_json(
        path := tmp_path / "config.json",
        sealed({"identity": {}, "experiment": {"scenario": "xor", "dataset": "mnist"}}),
    )
    assert config_files.run_config(path) == RunConfig(scenario="xor")
    (other := tmp_path / "run.yaml").write_text("dataset: mnist\nlabel_column: y\nlearning_rate: 0.2\n")
    assert config_files.run_config(other, scenario="xor") == RunConfig(scenario="xor", learning_rate=0.2)
    with pytest.raises(ValueError, match="dataset is 'cifar10', but scenario xor makes its own data"):
        config_files.run_config(other, scenario="xor", dataset="cifar10")


def test_the_most_clusters_of_one_method_are_no_number_of_anothers(tmp_path):
    """Compared with the file of a run of CFL's, IFCA had K = 16."""
    (path := tmp_path / "run.yaml").write_text("method: cfl\nclusters: 16\nclients: 32\n")
    configs, _ = flags.parse_compare(["cfl", "ifca", "stocfl"], ["--config", str(path)], "compare")
    assert {method: config.clusters for method, config in configs.items()} == {"cfl": 16, "ifca": None, "stocfl": 16}
    path.write_text("clusters: 3\nclients: 32\n")
    configs, _ = flags.parse_compare(["cfl", "ifca"], ["--config", str(path)], "compare")
    assert {config.clusters for config in configs.values()} == {3}


def test_options_of_a_file_without_a_method_are_those_of_the_method_that_is_typed():
    """Faults: FedGWC's beta of 2 was refused by CFL-GP's bound, of a run, of several methods and in Python."""
    path = yaml("method_options: {beta: 2.0}")
    assert parsed("--config run.yaml", "fedgwc").method_options == {"beta": 2.0}
    assert config_files.run_config(path, method="fedgwc").method_options == {"beta": 2.0}
    configs, _ = flags.parse_compare(["fedgwc", "fedavg"], ["--config", "run.yaml"], "compare")
    assert configs["fedgwc"].method_options == {"beta": 2.0}
    assert cli.main(["run", "--config", "run.yaml", "--dry-run"]) == 2  # CFL-GP's


@pytest.mark.parametrize(
    ("file", "changes", "kept"),
    [
        ({"method": "cfl_gp", "learning_rate": 0.3}, {"local_steps": 10}, False),  # averages gradients by itself
        ({"method": "cfl_gp", "learning_rate": 0.3}, {"rounds": 10}, True),
        ({"method": "fedavg", "local_steps": 5, "learning_rate": 0.1}, {"averaging": "gradients"}, False),
        ({"method": "fedavg", "learning_rate": 0.1}, {"local_epochs": 2}, True),
    ],
)
def test_the_servers_rate_is_not_the_clients_where_the_file_leaves_averaging_to_the_method(file, changes, kept):
    assert ("learning_rate" in config_files.overridden(file, changes)) == kept


def test_another_fault_or_rule_comes_without_the_options_of_the_one_before():
    yaml("fault: sign-flip\nfault_scale: 5\naggregation: trimmed-mean\ntrim: 0.2")
    config = parsed("--config run.yaml --fault drop-out --aggregation mean", "fedavg")
    assert (config.fault, config.fault_scale, config.trim) == ("drop-out", None, None)
    same = parsed("--config run.yaml --fault sign_flip", "fedavg")
    assert (same.fault_scale, same.trim) == (5, 0.2)


@pytest.mark.parametrize("words", ["--local-epochs 2", "--local-epochs 1 2", "--averaging gradients"])
def test_a_flag_replaces_a_files_list_of_the_steps_that_are_no_more(words):
    yaml("local_steps: [1, 10]\nlearning_rate: [0.1, 0.3]")
    cells, _ = flags.parse_sweep("fedavg", ["--config", "run.yaml", *words.split()], "sweep")
    assert len(cells) == (4 if words.endswith("1 2") else 2)
    assert all(cell.config.local_steps is None for cell in cells.values())
