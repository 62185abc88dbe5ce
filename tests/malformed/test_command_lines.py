"""A malformed command line is refused in one line and status 2 before anything is computed, or there is a reason."""

import os
import shutil

import pytest

from fedjax_cluster import cli
from tests.malformed import lines

LINES = tuple(lines.lines())
NOTHING, LITTLE = "0 1e-50", "1e-50"
# Flag -> words that it takes although they are odd, and why.
ACCEPTED = {
    "--momentum": (NOTHING, "no momentum; in float32 the smaller number is 0 as well"),
    "--server-momentum": (NOTHING, "no momentum"),
    "--weight-decay": (NOTHING, "no decay"),
    "--seed": ("0", "a seed"),
    "--transform-seed": ("0", "a seed"),
    "--run-dir": ("no-such-thing", "a directory to make"),
    "--output": ("no-such-thing", "a directory to make"),
    "--record": ("no-such-thing", "a file to make"),
    "--epsilon-1": (NOTHING, "clusters are never stationary, and stay together"),
    "--epsilon-2": (NOTHING, "every cluster holds a client that is far from stationary"),
    "--gamma-max": (NOTHING, "keeps every split, as its help says"),
    "--first-round": ("0", "the first round is 0"),
    "--cluster-until": ("0", "never clusters"),
    "--decimals": ("0", "whole numbers are sent"),
    "--proximal": (NOTHING, "no pull"),
    "--prototype-weight": (NOTHING, "no pull"),
    "flag --beta": (NOTHING, "gradients alone"),
    "--delta": (NOTHING, "class sizes do not count"),
    "--gradient-epochs": ("0", "data alone, as its help says"),
    "--vector-share": (LITTLE, "one vector, as its help says"),
    "--tau": ("-1 0 1e-50", "a cosine"),
    "--mixing": (NOTHING, "no pull"),
    "--warm-up": ("0", "clusters before any training of all together, as FedClust does"),
    "--threshold": (NOTHING, "merges only what is equal"),
    "--similarity-weight": (NOTHING, "IFCA's rule, as its help says"),
    "--angles": ("-1 0 1e-50", "degrees, of which the last turn nothing"),
    "--alpha": ("0 inf 1e39 1e-50", "the limits of the Dirichlet distribution and what is near, as its help says"),
    "--kappa": (NOTHING, "all images of the third group are upside down"),
    "--shifts": ("-1 0 26-digits", "counted modulo the number of classes"),
    "--sigma": (NOTHING, "equal sizes, as its help says"),
    "--noise": (NOTHING, "no noise"),
    "--common": (NOTHING, "every step depends on the topic"),
    "--blur": (NOTHING, "no blur"),
    "--init-scale": (NOTHING, "parameters start at 0"),
    "--dropout": (NOTHING, "no dropout"),
    "--checkpoint-every": (NOTHING, "after every segment, as its help says"),
}
# Flags whose words `init` refuses, which knows the model's parameters.
PATTERNS = ("--profile-layers", "--shared-layers", "--layers")
# What a message calls a flag by another name.
ALSO = {
    "dataset": "data set",
    "out": "no summary.json yet",
    "maybe": "Unrecognized options: maybe",
    "page": "unknown recipe",
}
PARTS = 24
# Lines that were accepted in silence or ended in a traceback, and some that no flag gives.
NAMED = [
    ("run gradient-loss --similarity euclidean --step-size nan", "step_size is nan"),
    ("run gradient-loss --similarity euclidean --step-size -1", "step_size is -1"),
    ("run gradient-loss --similarity euclidean --step-size 0", "step_size is 0"),
    ("run ifca --weighting example", "--weighting"),
    ("run --angles 1e30", "angles="),
    ("run --model cnn --kernel-size 99", "kernel_size is 99, but images are 8 × 8"),
    ("run --min-examples 100000", "min_examples=100000 goes with alpha"),
    ("run --scenario dirichlet --min-examples 100000", "too few for 100000 each"),
    ("run --scenario dirichlet --client-sizes equal --min-examples 20", "client_sizes are 'equal'"),
    ("run --scenario dirichlet --alpha 1e308", "alpha is 1e+308"),
    ("run --scenario linear-regression --phi 1e-50", "phi is 1e-50"),
    ("run --scenario domains --blur 99", "blur=99"),
    ("run --join 5:3 --leave 5:3", "client 3 join and leave before round 5"),
    ("run --leave 5:3 --join 5:3", "client 3 join and leave before round 5"),
    (f"run --join {lines.LONG}:3", "the round of a churn is 99999"),
    (f"run --leave 5:{lines.LONG}", "leave of a churn is"),
    ("run --leave 5:99", "names client 99"),
    ("run cfl-gp --beta 1e-50", "beta is 1e-50"),
    ("run cfl-gp --decimals 400", "decimals is 400"),
    ("run fedgwc --rate 1e-50", "rate is 1e-50"),
    ("run flag --interval 1e-50", "interval is 1e-50"),
    ("run --seed 4294967296", "seed is 4294967296; it must be a whole number of 32 bits"),
    (f"run --seed {'9' * 5000}", "seed"),
    ("run --batch-size 8.5", "--batch-size"),
    ("run --model mlp --normalize 0.5 0", "deviation of normalize is 0.0"),
    ("run --seed", "--seed"),
    ("run --seed 1 2", "2"),
    ("run --no-such-flag", "--no-such-flag"),
    ("run cfl-gp surplus", "surplus"),
    ("compare fedavg --seeds", "--seeds"),
    ("compare fedavg --seeds 20000", "seeds is 20000"),
    ("compare fedavg --seed 4294967295 --seeds 2", "seeds"),
    ("compare fedavg ifca surplus", "surplus"),
    (f"resume {'a' * 300}", "run_dir is 'aaaa"),
    (f"resume {'a/' * 3000}", "run_dir is 'a/a/"),
    (f"report {'a' * 300}", "RUN_DIR is 'aaaa"),
    ("reproduce no-such-recipe", "no-such-recipe"),
    ("bench no-such-suite", "no-such-suite"),
    ("dance", "dance"),
]


def refusal(words, capsys, accepted):
    """What a line is answered; None where it is accepted in silence."""
    try:
        status = cli.main(words)
    except accepted:
        captured = capsys.readouterr()
        assert "Warning" not in captured.err, (words, captured.err)
        return None
    captured = capsys.readouterr()
    assert status == 2, words
    assert captured.err.count("\n") == 1, (words, captured.err)
    assert captured.err.startswith("fedjax-cluster: "), (words, captured.err)
    return captured.err


def fault(line, capsys, accepted):
    """What is wrong with how a line is answered; None where nothing is."""
    if os.path.isdir("no-such-thing"):  # that an earlier line made
        shutil.rmtree("no-such-thing")
    said = refusal(line.words, capsys, accepted)
    words, _ = ACCEPTED.get(line.flag) or ACCEPTED.get(f"{line.before[-1]} {line.flag}") or ("", "")
    if line.flag in PATTERNS or line.word.replace(lines.LONG, "26-digits") in words.split():
        return said and f"refused, but listed as accepted: {said}"
    if said is None:
        return "accepted"
    name = line.flag.removeprefix("--")
    named = any(
        text in said for text in (name, name.replace("-", "_"), ALSO.get(name, name), ALSO.get(line.word, name))
    )
    return None if named else f"does not name it: {said}"


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_a_malformed_line_is_refused_in_one_line_that_names_the_flag(part, capsys, stopped):
    faults = {line.name: text for line in LINES[part::PARTS] if (text := fault(line, capsys, stopped)) is not None}
    assert not faults


def test_the_lines_are_many_and_the_table_names_flags():
    assert len(LINES) + len(NAMED) >= 900
    assert {name.split()[-1] for name in ACCEPTED} | set(PATTERNS) <= {line.flag for line in LINES}


@pytest.mark.parametrize(("line", "message"), NAMED)
def test_lines_that_were_accepted_or_ended_in_a_traceback(line, message, capsys, stopped):
    assert message in (refusal(line.split(), capsys, stopped) or "accepted")
