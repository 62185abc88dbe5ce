"""`fedjax-cluster plan`: its own flags beside those of `run`, and what is wrong said in one line."""

import pytest

from fedjax_cluster import cli
from fedjax_cluster.experiments import device_plans
from fedjax_cluster.experiments.device_plans import NAMED, _flag
from fedjax_cluster.simulation import planning

SMALL = ["--clients", "8", "--rows", "4", "--input", "3", "--model", "linear", "--batch-size", "2"]


@pytest.mark.slow
def test_a_population_without_data(capsys):
    flags = ["--dtype", "float32", "--local-steps", "1", "--fault", "sign-flip"]
    assert cli.main(["plan", "fedavg", *SMALL, *flags]) == 0
    shown, said = capsys.readouterr()
    assert "planned is a run without the fault" in said
    assert "FedAvg: compiled, not timed" in shown
    assert "8 of 4 rows, 8 a round" in shown
    assert "peak memory" in shown


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--device", "v9"], "device is 'v9'; known: v5e:2x4"),
        (["--rounds", "0"], "rounds"),
        (["--dtype", "float31"], "dtype is 'float31'"),
        (["--clients", "0"], "clients"),
        (["--dataset", "mnist"], "--dataset names data, but --rows plans a population without any"),
        (["--scenario=label-swap"], "--scenario names data"),
        (["--task", "regression"], "--task names data"),
        (["--examples-per-client=9"], "--examples-per-client names data"),
        (["--test-rows", "-1"], "test_rows is -1"),
        (["--input"], "input has no numbers"),
        (["--run-dir", "x"], "--run-dir is for a run, but a plan runs nothing"),
        (["--tune"], "--tune is for a run"),
        (["--checkpoint-every=5"], "--checkpoint-every is for a run"),
    ],
)
def test_mistakes_are_one_line(words, complaint, capsys):
    assert cli.main(["plan", "fedavg", *SMALL, *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("words", "tests"), [([], 27), (["--test-fraction", "0.5"], 63), (["--test-rows", "4"], 4)])
def test_test_rows_are_those_of_a_run(words, tests, monkeypatch, capsys):
    """A fifth was taken, whatever the fraction."""

    def planned(algorithm, shape, **rest):
        raise ValueError(f"tests are {shape.tested_on}")

    monkeypatch.setattr(device_plans, "plan", planned)
    shape = ["--clients", "8", "--rows", "63", "--input", "3", "--model", "linear"]
    assert cli.main(["plan", "fedavg", *shape, *words]) == 2
    assert f"tests are {tests}" in capsys.readouterr().err


def test_a_file_tells_the_method(monkeypatch, tmp_path, capsys):
    """Fault: whatever the file named, CFL-GP was planned, with the file's other settings."""

    def planned(algorithm, shape, **rest):
        raise ValueError(f"planned is {algorithm.name} with {algorithm.clusters}")

    monkeypatch.setattr(device_plans, "plan", planned)
    (path := tmp_path / "run.yaml").write_text("method: ifca\nclusters: 5\nmodel: linear\n")
    given = ["--clients", "8", "--rows", "63", "--input", "3", "--config", str(path)]
    assert cli.main(["plan", *given]) == 2
    assert "planned is ifca with 5" in capsys.readouterr().err


def test_rows_need_clients(capsys):
    assert cli.main(["plan", "fedavg", "--rows", "4"]) == 2
    assert "--clients" in capsys.readouterr().err


@pytest.mark.slow
def test_texts_are_planned_by_their_length(capsys):
    shape = ["--clients", "4", "--rows", "4", "--input", "6", "--classes", "50", "--local-steps", "1"]
    assert cli.main(["plan", "fedavg", "--model", "lstm", *shape]) == 0
    assert "4 of 4 rows" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--input", "3"], ["--test-rows", "3"], ["--classes", "3"], ["--dtype", "float32"]])
def test_the_shape_of_a_population_without_data_needs_rows(words, capsys):
    """The data set's own was planned, and the flag had no effect."""
    assert cli.main(["plan", "fedavg", "--clients", "4", *words]) == 2
    assert f"{words[0][2:].replace('-', '_')} is " in (said := capsys.readouterr().err)
    assert "give rows too" in said


def refused(*given):
    return planning._Rounds(None, None, 1, "", "RESOURCE_EXHAUSTED", 0.0, 1)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["cfl", "--clients", "1000000"], "--landmarks 256, say: numbers for each client and landmark in place of all"),
        (["fl-hc", "--clients", "1000000"], "--cluster-cohort and a --participation below 1: a cohort is compared in"),
        (["fl-hc", "--clients", "1000000", "--participation", "0.1"], "--cluster-cohort: a cohort is compared in"),
        (["cfl", "--clients", "1000000", "--landmarks", "9"], "the compiler says: RESOURCE_EXHAUSTED"),
        (["fl-hc", "--clients", "1000000", "--cluster-cohort"], "the compiler says: RESOURCE_EXHAUSTED"),
        (["cfl", "--clients", "100"], "the compiler says: RESOURCE_EXHAUSTED"),
    ],
)
def test_what_spares_a_matrix_of_all_clients_is_advised_first_as_a_flag(words, first, monkeypatch, capsys):
    monkeypatch.setattr(planning, "_compiled_rounds", refused)
    assert cli.main(["plan", *words, "--rows", "4", "--input", "3", "--model", "linear"]) == 1
    shown = capsys.readouterr().out.partition("1 program")[2]
    assert " ".join(shown.replace("to change", "").split()).startswith(first)


def test_advice_names_flags():
    lines = ("a smaller cohort (participation), or chunk_size=1", "fewer clients at a time (chunk_size)")
    named = [NAMED.sub(_flag, line) for line in lines]
    assert named == ["a smaller cohort (--participation), or --chunk-size 1", "fewer clients at a time (--chunk-size)"]
    of_profiles = NAMED.sub(_flag, 'landmarks=256 and profiles_of="landmarks", say; or a higher compression')
    assert of_profiles == "--landmarks 256 and --profiles-of landmarks, say; or a higher --compression"


@pytest.mark.slow
def test_an_autoencoder_gives_back_its_input(capsys):
    words = "plan fedavg --model csi-autoencoder --latent 16 --clients 2 --rows 2 --input 2 32 32 --batch-size 2"
    assert cli.main(words.split()) == 0
    assert "2 of 2 rows" in capsys.readouterr().out


def test_rows_and_a_population_are_two_kinds_of_clients(capsys):
    assert cli.main(["plan", "fedavg", *SMALL, "--population", "somewhere"]) == 2
    assert "the clients are those of the population somewhere" in capsys.readouterr().err
