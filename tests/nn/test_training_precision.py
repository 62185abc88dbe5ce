"""Training in bfloat16 with parameters kept in float32."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_cluster as fc
from fedjax_cluster import local, nn
from fedjax_cluster.experiments.runs import run
from fedjax_cluster.nn.precision import mixed_precision
from fedjax_cluster.types import ClientData, DatasetInfo

IMAGES = DatasetInfo("images", (8, 8, 3), 4)
MODELS = {
    "mlp, normalised": (nn.mlp((16,), normalize=(0.5, 0.25)), IMAGES),
    "cnn": (nn.cnn((4, 8), kernel_size=3, dense=(8,)), IMAGES),
    "residual with batch norm": (nn.resnet18(4, blocks=(1, 1)), IMAGES),
    "lstm": (nn.lstm((8,), embedding=4), DatasetInfo("text", (5,), 20, "language")),
}


def client(info, rows=12):
    rng = np.random.default_rng(0)
    if info.task == "language":
        tokens = rng.integers(0, info.num_classes, (rows, info.input_shape[0] + 1))
        x, y = tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)
    else:
        x = rng.integers(0, 256, (rows, *info.input_shape)).astype(np.uint8)
        y = rng.integers(0, info.num_classes, rows).astype(np.int32)
    return ClientData(jnp.asarray(x), jnp.asarray(y), jnp.asarray(rows, jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mlp, normalised", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "mlp, normalised")],
)
def test_training_computes_in_bfloat16_and_keeps_float32_parameters(name):
    model, info = MODELS[name]
    data, variables = client(info), model.init(jax.random.key(0), info)
    narrow, wide = (
        local.sgd(optax.sgd(0.1, momentum=0.9), batch_size=4, steps=3, precision=precision).run
        for precision in ("bfloat16", "float32")
    )
    with jax.numpy_dtype_promotion("standard"):  # Flax's batch norm mixes its float32 statistics in
        program = str(jax.make_jaxpr(lambda key, v: narrow(key, model, v, data))(jax.random.key(1), variables))
        found = jax.jit(lambda key, v: narrow(key, model, v, data))(jax.random.key(1), variables)
    names = ("dot_general[", "dense_product[", "own_weight_convolution[")
    products = [line for line in program.splitlines() if any(name in line for name in names)]
    assert products
    assert all("bf16[" in line.split("=")[0] for line in products), "a product outside the narrow format"
    kept = (found.delta, found.stats, found.losses)
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype("float32")}
    chex.assert_tree_all_finite(kept)
    expected = jax.jit(lambda key, v: wide(key, model, v, data))(jax.random.key(1), variables)
    chex.assert_trees_all_close(found.losses, expected.losses, rtol=0.05)
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, found.delta, expected.delta))
    size = optax.tree.norm(expected.delta)
    assert difference < (0.3 if model is MODELS["residual with batch norm"][0] else 0.1) * size


def test_small_steps_are_not_lost_as_they_would_be_in_bfloat16_parameters():
    model, data = nn.mlp((16,)), client(IMAGES)
    variables = model.init(jax.random.key(0), IMAGES)
    steps = local.sgd(1e-4, batch_size=None, steps=20, precision="bfloat16")
    change = steps.run(jax.random.key(1), model, variables, data).delta
    # A kernel entry of about 0.05 has a spacing of 2⁻¹² in bfloat16; these steps are far smaller.
    moved = jnp.abs(change["output"]["kernel"])
    assert 0 < moved.max() < 2**-10
    assert (moved > 0).mean() > 0.8  # the rest belongs to ReLUs that are never active


@pytest.mark.slow
def test_evaluation_stays_in_float32():
    model = nn.mlp((16,))
    variables = model.init(jax.random.key(0), IMAGES)
    x = client(IMAGES).x
    outputs, _ = model.apply(variables, x, train=False)
    narrow, _ = mixed_precision(model).apply(variables, x, train=False)
    chex.assert_type(narrow, jnp.float32)
    assert 0 < jnp.abs(outputs - narrow).max() < 0.05
    first, expected = (
        local.sgd(0.1, batch_size=None, steps=1, precision=precision).first_loss(
            jax.random.key(1), model, variables, client(IMAGES)
        )
        for precision in ("bfloat16", "float32")
    )
    assert first == expected


def test_another_precision_is_refused():
    with pytest.raises(ValueError, match="precision is 'float16'; it must be 'float32' or 'bfloat16'"):
        mixed_precision(nn.linear(), "float16")
    with pytest.raises(ValueError, match="precision is 'float16'"):
        local.sgd(0.1, batch_size=None, steps=1, precision="float16")
    with pytest.raises(ValueError, match="precision is 'half'"):
        fc.RunConfig(precision="half")


@pytest.mark.slow
def test_figures_on_digits_are_those_of_float32():
    def accuracy(precision):
        config = fc.RunConfig(
            method="cfl_gp", clients=8, rounds=60, learning_rate=0.5, precision=precision, eval_every=60
        )
        summary = run(config).summary
        return summary["accuracy"], summary["adjusted_rand_index"]

    narrow, wide = accuracy("bfloat16"), accuracy("float32")
    assert wide[0] > 0.8
    assert abs(narrow[0] - wide[0]) < 0.015
    assert narrow[1] == wide[1]


@pytest.mark.slow
def test_data_in_bfloat16_are_taken_by_convolutions_with_float32_weights():
    model = nn.cnn(channels=(2,), dense=(4,))
    info = DatasetInfo("images", (8, 8), 3, "classification")
    x = jax.random.normal(jax.random.key(0), (2, 8, 8))
    variables = model.init(jax.random.key(1), info)
    narrow, wide = (model.apply(variables, x.astype(dtype), train=False)[0] for dtype in (jnp.bfloat16, jnp.float32))
    chex.assert_type(narrow, jnp.float32)
    chex.assert_trees_all_close(narrow, wide, rtol=1e-7, atol=0.05)


@pytest.mark.parametrize(
    ("model", "info"),
    [
        (nn.mlp((4,)), DatasetInfo("rows", (5,), 3)),
        (nn.linear(), DatasetInfo("rows", (5,), 3)),
        (nn.cnn((4,), dense=(), pool=1), DatasetInfo("images", (14, 14), 3)),  # rows last
        (nn.cnn((64,), dense=(), pool=1), DatasetInfo("images", (6, 6), 3)),
        (nn.lstm((4,), embedding=3, init="flax"), DatasetInfo("tokens", (8,), 6, "language")),
    ],
    ids=["mlp", "linear", "cnn", "wide cnn", "lstm"],
)
def test_gradients_of_biases_and_of_frequent_tokens_are_added_up_in_float32(model, info):
    """In bfloat16 a sum of ones stops at 256: a bias's gradient was a sixtieth of it, an embedding's a third."""
    variables = model.init(jax.random.key(0), info)
    params = jax.tree.map(lambda leaf: 0.1 * jnp.abs(leaf) + 0.1, variables.params)
    kind = jnp.int32 if info.task == "language" else jnp.float32
    x = jnp.ones((600, *info.input_shape), kind)

    def total(params, of):
        return of.apply(variables._replace(params=params), x, train=True)[0].sum()

    wide, narrow = (jax.grad(total)(params, of) for of in (model, nn.mixed_precision(model)))
    assert float(max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(wide))) > 500
    chex.assert_trees_all_close(narrow, wide, rtol=0.03, atol=0.03 * 600 * 0.01)
