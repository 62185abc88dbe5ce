"""What flags there are, what help says about them, and what the shell completes."""

import io
import json
import re
import shutil
import subprocess
import sys

import pytest

from fedjax_cluster import cli, endings
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.experiments import flags
from fedjax_cluster.experiments.completion import SHELLS
from fedjax_cluster.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def test_names_with_hyphens_and_underscores():
    for method, scenario in (("cfl-gp", "mixed-datasets"), ("cfl_gp", "mixed_datasets")):
        config, _ = flags.parse_run(method, ["--scenario", scenario], "run")
        assert (config.method, config.scenario) == ("cfl_gp", "mixed_datasets")


def test_every_option_of_a_method_is_a_flag():
    words = "--every 3 --beta 0.5 --cluster-until 9 --stop-after 4 --compression 10 --profile-layers output"
    words += " --decimals 3 --shared-layers !output --weighting examples --cluster-cohort --angles 0 15"
    config, _ = flags.parse_run("cfl-gp", words.split(), "run")
    assert config.method_options["profile_layers"] == ["output"]
    assert config.method_options["cluster_cohort"] is True
    assert config.method_options["decimals"] == 3
    assert config.scenario_options == {"angles": [0.0, 15.0]}
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


def test_a_scenarios_option_of_a_name_that_the_method_has_too_is_a_flag_of_its_own():
    words = ["--angles", "sum", "--scenario-angles", "0", "90"]
    config, _ = flags.parse_run("pacfl", words, "run")
    assert (config.method_options["angles"], config.scenario_options) == ("sum", {"angles": [0.0, 90.0]})
    configs, _ = flags.parse_compare(
        ["pacfl", "fedavg"], ["--angles", "sum", "--scenario-angles", "0", "90"], "compare"
    )
    assert configs["fedavg"].method_options == {}
    assert configs["fedavg"].scenario_options == {"angles": [0.0, 90.0]}


def test_options_of_several_numbers_each_are_flags():
    words = "--scenario label-swap --pairs 1 7 3 5 --normalize 0.5 0.25"
    config, _ = flags.parse_run("fedavg", words.split(), "run")
    assert config.scenario_options == {"pairs": [[1, 7], [3, 5]]}
    assert config.model_options == {"normalize": [0.5, 0.25]}
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


def helped(capsys, *words):
    """The lines of a help, and its flags' entries."""
    with pytest.raises(SystemExit) as stop:
        cli.main([*words])
    assert not stop.value.code
    lines = capsys.readouterr().out.splitlines()
    shown = [re.sub("[│╭╮╰╯─]", "", line) for line in lines]
    text = "\n".join(line for line in shown if not re.fullmatch(r"\s*(-+|[\w-]+ options)?\s*", line))
    _, *entries = re.split(r"\n +(?=--)", text)
    return lines, {re.match(r"--([\w-]+)", entry)[1]: " ".join(entry.split()) for entry in entries}


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_every_flag_says_what_it_is(method, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines, short = helped(capsys, "run", method, "--help")
    _, whole = helped(capsys, "run", method, "--help-all")
    assert sum(-(-len(line) // 80) or 1 for line in lines) <= 100
    assert len(short) >= 20
    assert set(short) < set(whole)
    assert len(whole) > 60
    for entry in (*short.values(), *whole.values()):
        told = re.sub(r"\(default:.*?\)|\{.*?\}|--[\w-]+|\b[A-Z:]+\b|[][|,]|\.\.\.", "", entry).split()
        assert len(told) > 1, entry
        assert told[:2] != ["as", "in"], entry
        assert "None" not in entry.partition("(default:")[2], entry


def test_help_has_groups_and_the_real_defaults(capsys):
    lines, entries = helped(capsys, "run", "cfl-gp", "--help")
    titles = [line.strip(" │╭╮╰╯─") for line in lines if re.search(r"\boptions\b", line)]
    assert titles[-5:] == ["data options", "model options", "cfl-gp options", "training options", "run options"]
    assert "(default: 0 90 180 270)" in entries["angles"]
    assert "(default: 200)" in entries["hidden"]
    assert entries["run-dir"].endswith("(default: a new one in runs/)")
    assert "alphas" not in entries, "of another scenario"
    _, entries = helped(capsys, "run", "--scenario", "heterogeneity-levels", "--model", "cnn", "--help")
    assert {"alphas", "kernel-size"} <= set(entries)
    assert not {"angles", "hidden"} & set(entries)
    _, entries = helped(capsys, "compare", "cfl-gp", "pacfl", "--help-all")
    assert "(default: rotated: 0 90 180 270; linear-regression: none)" in entries["scenario-angles"]


@pytest.mark.slow
def test_clusters_are_explained_as_far_as_the_methods_take_them(capsys):
    """--clusters auto was offered with every method, of which all but one refuse it."""
    needs, finds = "the number of the scenario's groups", "the largest K where it finds"
    for words, told, untold in (
        ("run ifca", [needs], [finds, "auto"]),
        ("run flag", [finds], [needs, "auto"]),
        ("run cfl-gp", [needs, "INT|{auto}", "auto estimates it"], [finds]),
        ("compare ifca flag", [needs, finds], ["auto"]),
        ("compare ifca cfl-gp", [needs, "INT|{auto}", "auto estimates it"], [finds]),
        ("sweep ifca", [needs, "INT ..."], [finds, "auto"]),
    ):
        entry = helped(capsys, *words.split(), "--help-all")[1]["clusters"]
        assert all(text in entry for text in told), entry
        assert not any(text in entry for text in untold), entry
    assert "of no effect" in helped(capsys, "run", "fedavg", "--help-all")[1]["clusters"]
    assert flags.parse_run("fedavg", ["--clusters", "3"], "run")[0].clusters == 3


def test_compare_says_what_it_compares(capsys):
    lines, _ = helped(capsys, "compare", "--help")
    assert f"Methods: {', '.join(REGISTRY).replace('_', '-')}; --all takes every one" in " ".join(lines)
    lines, entries = helped(capsys, "compare", "ifca", "fedavg", "--help")
    assert "Compares ifca, fedavg on the same federations" in " ".join(lines)
    assert "score-on" in entries
    for words in (("cfl", "flag", "fedgwc"), ("--all",)):
        lines, entries = helped(capsys, "compare", *words, "--help")
        assert len(lines) <= 100
        assert "epsilon-1" not in entries
        assert "clusters" in entries
    assert "epsilon-1" in helped(capsys, "compare", "--all", "--help-all")[1]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "run ifca", "compare cfl-gp ifca", "resume", "reproduce"])
def test_help_names_the_flags(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.split(), "--help"])
    assert not stop.value.code
    shown = capsys.readouterr().out
    expected = {"resume": "--rounds", "reproduce": "cfl-gp-table10"}.get(command.split()[0], "--angles")
    assert expected in shown


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_commands_flags_and_names(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    words = "run completion --cluster-until --scenario householder --quick --empty --seeds"
    assert all(word in script for word in words.split())
    assert len(script) > 10_000


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        *(("resume runs/", ""), ("run --dataset my.np", ""), ("run ifca fl", ""), ("run --scen", "--scenario")),
        *(("run --averaging mod", "models"), ("run if", "ifca"), ("compare cfl-gp if", "ifca")),
        *(("compare cfl-gp ifca --scenario rot", "rotated"), ("run ifca --fault sign", "sign-flip")),
        *(("reproduce cfl-gp-table1", "cfl-gp-table10"), ("bench sp", "speed"), ("completion z", "zsh")),
        *(("compare cfl-gp --al", "--all"), ("compare cfl-gp --defaults-of fedav", "fedavg")),
    ],
)
def test_bash_completes_flags_and_else_names_of_files(words, offered, capsys, tmp_path):
    """Of no word at all bash takes its own, files; tyro's script offered an empty one in their place."""
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    ask = 'COMP_WORDS=(fedjax-cluster "$@"); COMP_CWORD=$#; _tyro_fedjax_cluster; printf "%s," "${#COMPREPLY[@]}"'
    ask = f'source ./script; complete -p fedjax-cluster; {ask}; echo "${{COMPREPLY[@]}}"'
    command = ["bash", "-c", ask, "bash", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    registered, found = done.stdout.splitlines()
    assert "-o default" in registered
    assert offered in found
    assert bool(offered) == (not found.startswith("0,"))


def test_list_names_everything(capsys):
    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("cfl-gp", "mixed-datasets", "lenet5", "digits", *RECIPES))


@pytest.mark.parametrize(("encoding", "printed"), [("cp1252", b"? \x85"), ("ascii", b"? ?"), ("utf-8", "β …".encode())])
def test_what_an_encoding_has_no_sign_for_is_a_question_mark(monkeypatch, encoding, printed):
    """Help with a Greek letter ended with an error where the output is Windows' or a cluster's ISO-8859."""
    outputs = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    for name, output in zip(("stdout", "stderr"), outputs, strict=True):
        monkeypatch.setattr(sys, name, output)
    endings.open_outputs()
    for output in outputs:
        print("β …", end="", file=output, flush=True)
        assert output.buffer.getvalue() == printed
    # Whose own way it is, as that of errors, keeps it.
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace"))
    endings.open_outputs()
    assert sys.stderr.errors == "backslashreplace"
