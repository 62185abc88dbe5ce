"""What the authors' codes leave, written here as they write it, is read beside our runs, and nothing of it is run."""

import json
import pathlib
import pickle

import numpy as np
import pytest

from fedjax_cluster import cli
from fedjax_cluster.experiments import public_codes
from fedjax_cluster.report import tables

GROUP = np.array([0, 0, 1, 1])


def dump(path, content, protocol=pickle.HIGHEST_PROTOCOL):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def cfl_gp(folder):
    """Five rounds evaluated in every second and the last, before their updates."""
    first, second, third = (np.full(4, share) for share in (0.1, 0.5, 0.9))
    labels = [np.zeros(4, int), np.array([0, 0, 1, 0]), GROUP, GROUP, GROUP]
    accuracies = [first, first, second, second, third]
    rounds = [
        {
            "estimated_cluster_ids": ids,
            "client_accuracy": found,
            "singular_values": None,
            "time_for_communication_round": 1.0,
        }
        for ids, found in zip(labels, accuracies, strict=True)
    ]
    return dump(folder / "data_tracking/metrics.pickle", {f"c_round_{i}": of for i, of in enumerate(rounds)})


def ifca(folder, accuracy=0.8):
    def of(acc, loss, ids):
        counts = [np.int64(ids.count(cluster)) for cluster in range(3)]
        figures = {"acc": np.float64(acc), "loss": np.float64(loss), "num_data": 40, "is_train": True}
        return {**figures, "cluster_assign": ids, "cl_ct": counts}

    epochs = [
        {"epoch": epoch, "train": of(0.5, 1.0 - epoch / 10, [0, 0, 1, 1]), "test": of(accuracy + epoch / 100, 0.7, [0])}
        for epoch in (-1, 0, 1)
    ]
    return dump(folder / "results.pickle", epochs)


def fedgwc(folder):
    tracking = {
        "train_track": {"loss": [1.0, 0.9, 0.8, 0.7, 0.6]},
        "test_track": {"loss": [0.95, 0.75], "accuracy": [0.3, 0.6], "balanced_accuracy": [0.2, 0.5]},
        "test_evaluation_step": 2,
    }
    (folder / "results").mkdir(parents=True)
    (folder / "results/tracking.json").write_text(json.dumps(tracking))
    last = {"global": {"loss": 0.65, "accuracy": 0.7, "balanced_accuracy": 0.6}}
    (folder / "results/evaluation.json").write_text(json.dumps(last))
    for cluster, members in (("0-0", ["10.blur", "2.noise"]), ("0-1", ["1.clean", "0.clean"])):
        (folder / "clusters" / cluster).mkdir(parents=True)
        (folder / "clusters" / cluster / "clients_ids.json").write_text(json.dumps(members))
    (folder / "clusters/clusters_ids.json").write_text(json.dumps(["0-0", "0-1"]))
    return folder


def pacfl(folder):
    folder.mkdir(parents=True)
    for name, values in (
        ("init_tacc_pr", [10.0, 40.0, 60.0]),
        ("init_tloss_pr", [3, 2, 1]),
        ("loss_train", [2, 1, 0.5]),
    ):
        np.save(folder / f"1_{name}.npy", np.array(values))
    return folder / "1_init_tacc_pr.npy"


def column(run, name):
    return [None if np.isnan(value) else round(float(value), 4) for value in run.history[name]]


def test_cfl_gps_evaluations_stand_with_the_round_before(tmp_path):
    cfl_gp(tmp_path)
    run = public_codes.read(tmp_path)
    assert run.code == "CFL-GP's code"
    assert column(run, "accuracy") == [None, 0.5, None, 0.9, None]
    assert column(run, "num_clusters") == [1, 2, 2, 2, 2]
    (outcome,) = public_codes.outcomes({"theirs": [tmp_path]}, GROUP)
    assert (outcome.summaries[0]["accuracy"], outcome.summaries[0]["clients"]) == (0.9, 4)
    assert outcome.summaries[0]["adjusted_rand_index"] == 1.0
    # Rounds are in their order, not in that of their names.
    content = {
        f"c_round_{i}": {"estimated_cluster_ids": None, "client_accuracy": np.full(2, i / 20)} for i in range(12)
    }
    run = public_codes.read(dump(tmp_path / "a.pickle", dict(sorted(content.items()))))
    assert column(run, "accuracy") == [*(i / 20 for i in range(1, 12)), None]
    for task, name in (("regression", "test_loss"), ("compression", "figure"), ("classification", "accuracy")):
        (tmp_path / "config.json").write_text(json.dumps({"task": task}))
        assert column(public_codes.read(tmp_path / "data_tracking"), name)[3] == 0.9
    # Decibels are no accuracy, whatever is not told of them.
    decibels = {
        f"c_round_{i}": {"estimated_cluster_ids": None, "client_accuracy": np.full(2, -5.0 * i)} for i in range(3)
    }
    assert column(public_codes.read(dump(tmp_path / "b/c/d.pickle", decibels)), "figure") == [-5, -10, None]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_of_every_pickle_are_read(protocol, tmp_path):
    content = {f"c_round_{i}": {"estimated_cluster_ids": GROUP, "client_accuracy": np.full(4, 0.5)} for i in range(2)}
    content["c_round_1"]["client_accuracy"] = [np.float32(0.5), np.float64(1.0), 0.25, 0.25]
    path = dump(tmp_path / "a.pickle", content, protocol)
    assert column(public_codes.read(path), "accuracy") == [0.5, None]
    # As NumPy 1 named its parts.
    if protocol < 4:
        path.write_bytes(path.read_bytes().replace(b"numpy._core.", b"numpy.core."))
        assert public_codes.read(path).clusters.tolist() == GROUP.tolist()


def test_ifcas_epochs_begin_with_the_first_that_was_trained(tmp_path):
    run = public_codes.read(ifca(tmp_path))
    assert (column(run, "accuracy"), column(run, "loss")) == ([0.8, 0.81], [1.0, 0.9])
    assert (run.clusters.tolist(), column(run, "num_clusters")) == ([0, 0, 1, 1], [2, 2])
    # That of CIFAR-10 keeps no clusters, the local one not every evaluation; a run that diverged says so.
    epochs = pickle.loads((tmp_path / "results.pickle").read_bytes())
    del epochs[1]["test"], epochs[1]["train"]["cluster_assign"], epochs[2]["train"]["cluster_assign"]
    epochs[2]["train"]["loss"] = float("nan")
    path = dump(tmp_path / "results_local.pickle", epochs)
    run = public_codes.read(path)
    assert (column(run, "accuracy"), run.clusters) == ([None, 0.81], None)
    (outcome,) = public_codes.outcomes({"theirs": [path]})
    assert np.isnan(outcome.summaries[0]["train_loss"])
    assert tables.diverged(outcome.summaries[0])


def test_fedgwcs_rounds_are_those_of_its_evaluations_and_its_clients_in_order(tmp_path):
    run = public_codes.read(fedgwc(tmp_path / "run"))
    assert column(run, "accuracy") == [None, 0.3, None, 0.6, 0.7]
    assert column(run, "balanced_accuracy") == [None, 0.2, None, 0.5, 0.6]
    assert column(run, "num_clusters") == [None, None, None, None, 2]
    assert run.clusters.tolist() == [1, 1, 0, 0]  # of the clients 0, 1, 2 and 10


def test_pacfls_percentages_are_shares_before_each_round(tmp_path):
    run = public_codes.read(pacfl(tmp_path / "run"))
    assert (column(run, "accuracy"), column(run, "test_loss")) == ([0.4, 0.6, None], [2, 1, None])
    assert column(run, "loss") == [2, 1, 0.5]
    np.save(tmp_path / "run/1_loss_train.npy", np.zeros(1))
    with pytest.raises(ValueError, match=r"1_loss_train\.npy has 1 rounds, and the accuracies have 3"):
        public_codes.read(tmp_path / "run")


class Harmful:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("harmed"),)


class Pointers:
    """An array of numbers whose type would say that they are where objects lie."""

    def __reduce__(self):
        return np._core.numeric._frombuffer, (b"12345678", Fields(), (1,), "C")


class Fields:
    def __reduce__(self):
        return np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)


# Gives NumPy's own function another name.
RENAMED = b"\x80\x02cnumpy._core.numeric\n_frombuffer\nN}X\x08\0\0\0__name__X\x04\0\0\0evils\x86b."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"c_round_0": Harmful()}), "which is not read"),
        (pickle.dumps([1, 2]), "damaged, or no public code's"),
        (pickle.dumps({"a": 1}), "holds no results of a public code that is known"),
        (pickle.dumps({"c_round_0": {}}), "damaged"),
        (pickle.dumps([{"epoch": -1}]), "it has no rounds"),
        (pickle.dumps({"c_round_0": Pointers()}), "values of the type 'V8', and not only numbers"),
        (pickle.dumps({"c_round_0": np.array([None])}), "values of the type 'O8', and not only numbers"),
        (RENAMED, "holds no results"),
        (b"\x80\x04c_codecs\nencode\nX\x01\0\0\0aX\x06\0\0\0nosuch\x86R.", "bytes as 'nosuch'"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", "damaged"),
        (b"text", "damaged"),
        (b"", "damaged"),
    ],
)
def test_what_is_something_else_is_one_line_and_is_not_run(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("results.pickle").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        public_codes.read("results.pickle")
    assert "\n" not in str(caught.value)
    assert not pathlib.Path("harmed").exists()
    assert np._core.numeric._frombuffer.__name__ == "_frombuffer"


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        public_codes.read(tmp_path / "none.pickle")
    (fedgwc(tmp_path / "g") / "clusters/0-1/clients_ids.json").unlink()
    with pytest.raises(ValueError, match=r"0-1/clients_ids\.json cannot be read"):
        public_codes.read(tmp_path / "g")
    (tmp_path / "1_init_tacc_pr.npy").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="damaged"):
        public_codes.read(tmp_path / "1_init_tacc_pr.npy")
    (tmp_path / "1_init_tacc_pr.npy").unlink()
    with pytest.raises(ValueError, match="holds no results of a public code: give the file"):
        public_codes.read(tmp_path)
    ifca(tmp_path)
    with pytest.raises(ValueError, match="theirs has 4 clients, but group has 3"):
        public_codes.outcomes({"theirs": [tmp_path]}, GROUP[:3])
    cfl_gp(tmp_path)
    with pytest.raises(ValueError, match=r"holds several results: metrics\.pickle, results\.pickle; give one"):
        public_codes.read(tmp_path)


@pytest.mark.usefixtures("here")
def test_their_runs_and_ours_are_in_one_table(pretend, capsys):
    words = "compare ifca --clients 4 --clusters 2 --rounds 2 --eval-every 1 --model linear --seeds 2 --run-dir own"
    assert cli.main(words.split()) == 0
    for seed, accuracy in enumerate((0.8, 0.7)):
        ifca(pathlib.Path(f"their-{seed}"), accuracy)
    capsys.readouterr()
    beside = [word for seed in range(2) for word in ("--beside", f"IFCA, its code=their-{seed}")]
    assert cli.main(["report", "own", *beside, "--out", "both"]) == 0
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "IFCA, its code" in shown
    assert "76.0 ± 7.1" in shown
    assert "not ranked, as runs differ in program" in pathlib.Path("both/comparison.md").read_text()
    assert "IFCA, its code" in pathlib.Path("both/report.html").read_text()
    assert pathlib.Path("both/learning_curves.png").is_file()
    # One run of ours is enough.
    assert cli.main(["report", "own/ifca-seed0", *beside[:2]]) == 0
    assert pathlib.Path("own/ifca-seed0/comparison.html").is_file()
    for wrong, message in (
        ("their-0", "give a name and a path"),
        ("ifca=their-0", "ifca is what a run here is called"),
    ):
        assert cli.main(["report", "own", "--beside", wrong]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
