"""Aggregation, server optimiser, shared layers, truncation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import aggregation, server, tree
from fedjax_cluster.algorithms.round import tie_layers
from fedjax_cluster.parallel.contributions import Contribution, Reduced
from fedjax_cluster.types import ClientData, Clusters, Cohort


def clusters(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "hidden_0": {"kernel": jnp.asarray(rng.normal(size=(3, 2, 2)), jnp.float32)},
        "output": {"bias": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)},
    }
    stats = {"norm": {"mean": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)}}
    return Clusters(params, stats, jnp.ones(3, bool))


def reduced(models, weight=(2.0, 0.0, 4.0)):
    weight = jnp.asarray(weight)
    total = {
        "delta": jax.tree.map(lambda leaf: tree.scale_rows(leaf * 0 + 1, weight), models.params),
        "stats": models.stats,
    }
    return Reduced(total, weight, jnp.asarray([1, 0, 2]), jnp.zeros((), jnp.int32))


def test_mean_change_is_added_and_empty_clusters_stay():
    models = clusters()
    start = server.with_optimizer(models, optax.sgd(1.0))
    new, refused = server.update_clusters(optax.sgd(1.0), start, reduced(models))
    assert not refused.any()
    for before, after in zip(jax.tree.leaves(models.params), jax.tree.leaves(new.params), strict=True):
        np.testing.assert_allclose(after[0], before[0] + 1, rtol=1e-6)
        np.testing.assert_array_equal(after[1], before[1])
        np.testing.assert_allclose(after[2], before[2] + 1, rtol=1e-6)
    np.testing.assert_array_equal(new.stats["norm"]["mean"][1], models.stats["norm"]["mean"][1])
    np.testing.assert_allclose(new.stats["norm"]["mean"][2], models.stats["norm"]["mean"][2] / 4, rtol=1e-6)


def test_heavy_ball_momentum_per_cluster():
    """FedAvgM: v ← 0.9 v + Δ, θ ← θ + v; an empty cluster's momentum rests too."""
    optimizer = optax.sgd(1.0, momentum=0.9)
    models = server.with_optimizer(clusters(), optimizer)
    start = models.params["output"]["bias"]
    for _ in range(3):
        models, _ = server.update_clusters(optimizer, models, reduced(models))
    np.testing.assert_allclose(models.params["output"]["bias"][0], start[0] + 1 + 1.9 + 2.71, rtol=1e-5)
    np.testing.assert_array_equal(models.params["output"]["bias"][1], start[1])


def best_so_far():
    """An optimiser whose state begins with infinity."""

    def update(updates, state, params=None):
        return updates, jnp.minimum(state, sum(jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)))

    return optax.GradientTransformation(lambda params: jnp.asarray(jnp.inf), update)


def test_a_cluster_whose_step_would_not_be_finite_keeps_all_it_has():
    """The mean change is finite, its momentum or the model after it is not; neither is the least loss at the start."""
    optimizer = optax.chain(best_so_far(), optax.trace(0.9))
    models = server.with_optimizer(clusters(), optimizer)
    sent = reduced(models)
    huge = jax.tree.map(lambda leaf: leaf.at[2].set(3e38), sent.total["delta"])
    sent = sent._replace(total={**sent.total, "delta": huge}, weight=jnp.asarray([2.0, 0.0, 1.0]))
    once, refused = server.update_clusters(optimizer, models, sent)
    assert refused.tolist() == [False, False, False]
    twice, refused = server.update_clusters(optimizer, once, sent)
    assert refused.tolist() == [False, False, True]
    for before, after in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
        np.testing.assert_array_equal(before[1:], after[1:])
    assert not np.array_equal(once.params["output"]["bias"][0], twice.params["output"]["bias"][0])


def test_shared_layers_are_the_mean_over_clients():
    models = clusters()
    new = server.share_layers(models, ["hidden_0"], jnp.asarray([1, 0, 3]))
    kernel = models.params["hidden_0"]["kernel"]
    expected = (kernel[0] + 3 * kernel[2]) / 4
    for row in new.params["hidden_0"]["kernel"]:
        np.testing.assert_allclose(row, expected, rtol=1e-6)
    np.testing.assert_array_equal(new.params["output"]["bias"], models.params["output"]["bias"])


def test_a_model_that_does_not_count_spreads_nothing():
    models = clusters()
    kernel = models.params["hidden_0"]["kernel"]
    spoilt = {**models.params, "hidden_0": {"kernel": kernel.at[1].set(jnp.nan)}}
    models = models._replace(params=spoilt)
    expected = (kernel[0] + 3 * kernel[2]) / 4
    for weight, active in (([1, 0, 3], [True] * 3), ([1, 5, 3], [True, False, True]), ([0.1, 0, 0.3], [True] * 3)):
        new = server.share_layers(models._replace(active=jnp.asarray(active)), ["hidden_0"], jnp.asarray(weight))
        for row in new.params["hidden_0"]["kernel"]:
            np.testing.assert_allclose(row, expected, rtol=1e-6)
    new = server.share_layers(models, ["hidden_0"], jnp.zeros(3))
    np.testing.assert_array_equal(new.params["hidden_0"]["kernel"], spoilt["hidden_0"]["kernel"])


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["!hidden_0", "!output"], "cfl_gp: shared_layers !hidden_0, !output has no parameter of this model, so"),
        (["*"], "has every parameter, so that all clusters are one model"),
        (["output"], ""),
        ([], ""),
    ],
)
def test_layers_that_are_all_shared_or_none_are_said(patterns, said, caplog):
    tie_layers(clusters(), patterns, "cfl_gp")
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_the_shared_part_is_counted_in_bytes_of_parameters_and_statistics():
    models = clusters()
    short = jax.tree.map(jnp.bfloat16, models.params["output"])
    models = models._replace(params={**models.params, "output": short, "norm": {"scale": jnp.ones((3, 2))}})
    layers = {**models.params, "norm": [models.params["norm"], models.stats["norm"]]}
    sizes = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(of)) for name, of in layers.items()}
    for name in ("output", "norm"):
        assert server.shared_part(models, [name]) == sizes[name] / sum(sizes.values())
    assert server.shared_part(models, ()) == 0.0
    assert server.params_part(models) == 1 - tree.num_bytes(models.stats) / sum(sizes.values())


def test_statistics_follow_their_layer():
    new = server.share_layers(clusters(), ["!output"], jnp.asarray([1, 1, 1]))
    mean = clusters().stats["norm"]["mean"]
    np.testing.assert_allclose(new.stats["norm"]["mean"][1], mean.mean(0), rtol=1e-6)


def test_an_unknown_layer_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'conv_9'.*hidden_0/kernel"):
        server.share_layers(clusters(), ["conv_9"], jnp.ones(3))


@pytest.mark.parametrize(
    ("decimals", "rounding", "expected"),
    [
        (0, "zero", [0.0, -0.0, 1.0]),
        (1, "zero", [0.1, -0.1, 1.9]),
        (0, "nearest", [0.0, -0.0, 2.0]),
        (1, "nearest", [0.2, -0.2, 2.0]),
        (None, "nearest", [0.19, -0.19, 1.99]),
    ],
)
def test_decimals_are_kept_to_the_nearest_or_towards_zero(decimals, rounding, expected):
    np.testing.assert_allclose(
        server.keep_decimals(jnp.asarray([0.19, -0.19, 1.99]), decimals, rounding), expected, atol=1e-6
    )


def test_numbers_keep_their_type_and_what_has_no_decimals_stays():
    values = {
        "half": jnp.asarray([1.25, 60000.0], jnp.float16),
        "whole": jnp.asarray([7, 2**30 + 1]),
        "large": jnp.asarray([3e38, -3e38]),
    }
    kept = server.keep_decimals(values, 3, "zero")
    for name, value in values.items():
        assert kept[name].dtype == value.dtype
        np.testing.assert_array_equal(kept[name], value)


def test_an_unknown_rounding_is_refused():
    for decimals in (2, None):
        with pytest.raises(ValueError, match="rounding is 'up', which is unknown"):
            server.keep_decimals(jnp.ones(2), decimals, "up")


def test_shared_layers_keep_their_types():
    params = {"a": jnp.array([1.0, 3.0], jnp.bfloat16)}
    models = Clusters(params, {"a": jnp.array([1, 4])}, jnp.ones(2, bool), None)
    new = server.share_layers(models, ["a"], jnp.array([1, 3]))
    assert new.params["a"].dtype == jnp.bfloat16
    assert new.params["a"].tolist() == [2.5, 2.5]
    assert new.stats["a"].dtype == jnp.int32


@pytest.mark.parametrize("rule", [None, aggregation.median()])
def test_contributions_in_parts_leave_rows_of_ones_own_what_they_become(rule):
    """Fault: beside a rule that sees all changes at once, rows become what is sent."""
    data = ClientData(jnp.arange(6.0).reshape(3, 1, 2), jnp.zeros((3, 1)), jnp.ones(3, jnp.int32))
    sent, mapped = server.aggregate_clients(
        lambda client, own: (client.data.x[0], own + 1),
        Cohort(jnp.arange(3), jnp.ones(3, bool), data),
        num_slots=2,
        parts=2,
        contribute=lambda client, output, number: (
            Contribution(number, jnp.ones(()), output[0] * (1.0 + number.astype(jnp.float32))),
            number,
        ),
        collect=lambda output, told: told,
        aggregation=rule,
        own=jnp.zeros((3, 2)),
        renew=lambda output: output[1],
    )
    np.testing.assert_array_equal(mapped.own, np.ones((3, 2)))
    np.testing.assert_array_equal(mapped.collected, [[0, 1]] * 3)
    np.testing.assert_allclose(sent.value, [[2, 3], [4, 6]])
