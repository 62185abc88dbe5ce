"""Which settings make another sweep of a directory's, and which follow from what is swept."""

import pytest

from fedjax_cluster import RunConfig
from fedjax_cluster.experiments.cell_settings import other_settings

ONE = {"learning_rate": 0.1, "local_steps": 1}


@pytest.mark.parametrize(
    ("old", "new", "swept", "told"),
    [
        ({}, {"eval_every": 2, "rounds": 8, "seed": 3}, "clusters", []),
        ({"tuning": {"figures": {"0.1": 0.5}}}, {"tuning": {"figures": {"0.1": 0.6}}}, "clusters", []),
        ({"tuning": {"figures": {}}}, {"tuning": {"figures": {}}, "learning_rate": 0.3}, "clusters", []),
        ({}, {"learning_rate": 0.3}, "clusters", ["learning_rate is 0.1 there and 0.3 here"]),
        ({"optimizer": "sgd", "momentum": 0.5}, {"optimizer": "adam"}, "optimizer", []),
        ({"averaging": "gradients", "local_steps": None}, {"momentum": 0.5}, "averaging", []),
        ({}, {"momentum": 0.5}, "clusters", ["momentum is 0.0 there and 0.5 here"]),
        ({"method": "fedavg"}, {"method": "ifca", "local_steps": 3}, "method", []),
        ({}, {"method_options": {"every": 2}}, "clusters", ["method_options.every is None there and 2 here"]),
        ({"method_options": {"every": 1}}, {"method_options": {"every": 2}}, "method_options.every", []),
        ({"clients": 8}, {"clients": None}, "clusters", []),
        ({"clients": 8}, {"clients": 9}, "clusters", ["clients is 8 there and 9 here"]),
    ],
)
def test_settings_that_no_cell_has_are_of_another_sweep(old, new, swept, told):
    base = {"method": "cfl_gp", **ONE}
    before, now = (RunConfig(**{**base, **changes}) for changes in (old, new))
    assert other_settings([before], [now], [swept]) == told


def test_a_setting_that_varies_on_either_side_decides_nothing():
    before = [RunConfig(**ONE), RunConfig(**ONE, weight_decay=0.1)]
    assert other_settings(before, [RunConfig(**ONE, weight_decay=0.2)], ["clusters"]) == []
    assert other_settings([], before, ["clusters"]) == []
