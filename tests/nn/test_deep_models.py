"""The larger models: residual networks, the recurrent model, the autoencoder."""

from functools import partial

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fedjax_cluster import nn
from fedjax_cluster.nn import layers
from fedjax_cluster.nn.recurrent import recurrence
from fedjax_cluster.types import DatasetInfo
from tests.devices import needs_two

KEY = jax.random.key(0)
SMALL = DatasetInfo("small", (16, 16, 3), 5)
NEWS = DatasetInfo("news", (6,), 11, "language")
CSI = DatasetInfo("csi", (2, 8, 8), 0, "reconstruction")


def random_variables(model, info):
    """Every leaf drawn at random, statistics positive, so that no layer is an identity."""
    shapes = jax.eval_shape(lambda key: model.init(key, info), KEY)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.float32(0.2) * rng.standard_normal(leaf.shape).astype(np.float32), shapes.params
    )
    stats = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(0.5, 2.0, leaf.shape), jnp.float32), shapes.stats)
    return shapes._replace(params=params, stats=stats)


RESIDUAL = {
    "resnet18": lambda: nn.resnet18(4, blocks=(1, 1, 1)),
    "mobilenet_v2": lambda: nn.mobilenet_v2(0.25, small_images=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_networks_on_flax_convolutions(name, monkeypatch):
    """The same network with Flax's layer in place of ours: strides, groups and padding in their places."""
    model = RESIDUAL[name]()
    variables = random_variables(model, SMALL)
    x = jax.random.normal(KEY, (2, 16, 16, 3))

    def run():
        return jax.jit(lambda v, x: model.apply(v, x, train=True, rng_key=KEY))(variables, x)

    outputs, stats = run()
    monkeypatch.setattr(layers, "Conv", linen.Conv)
    expected, expected_stats = run()
    chex.assert_shape(outputs, (2, 5))
    chex.assert_trees_all_close(outputs, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    chex.assert_trees_all_close(stats, expected_stats, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_training_moves_the_statistics_only_in_training():
    model = nn.resnet18(2, blocks=(1, 1))
    variables = random_variables(model, SMALL)
    x = jax.random.normal(KEY, (4, 16, 16, 3))
    same, moved = (jax.jit(lambda x, t=t: model.apply(variables, x, train=t)[1])(x) for t in (False, True))
    chex.assert_trees_all_equal(same, variables.stats)
    chex.assert_trees_all_equal_structs(moved, variables.stats)
    assert not any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), moved, variables.stats)))


def resolutions(module, size, names):
    """Heights of the outputs of the layers of those names, for a square image."""
    seen = {}

    def watch(next_call, args, kwargs, context):
        out = next_call(*args, **kwargs)
        if context.module.name in names:
            seen[context.module.name] = out.shape[1]
        return out

    with linen.intercept_methods(watch):
        jax.eval_shape(lambda key: module.init(key, jnp.zeros((1, size, size, 3)), False), KEY)
    return [seen[name] for name in names]


@pytest.mark.slow
def test_resolutions():
    """MobileNetV2 shrinks an image by 32, a small one by 8; ResNet-18 only between its stages."""
    names = ["conv_0", "stage_1_block_0", "stage_3_block_0", "conv_1"]
    assert resolutions(nn.residual.MobileNetV2(0.25, False, 0.2, 5, "torch"), 64, names) == [32, 16, 4, 2]
    assert resolutions(nn.residual.MobileNetV2(0.25, True, 0.2, 5, "torch"), 32, names) == [32, 32, 8, 4]
    names = [f"stage_{stage}_block_{i}" for stage in range(4) for i in range(2)]
    resnet = nn.residual.ResNet(4, (2, 2, 2, 2), 5, "torch")
    assert resolutions(resnet, 32, names) == [32, 32, 16, 16, 8, 8, 4, 4]


# ---- The recurrent model.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_lstm(x, layer):
    x = np.asarray(x, np.float64)
    features = layer["recurrent_kernel"].shape[0]
    cell = output = np.zeros((x.shape[0], features))
    outputs = []
    for t in range(x.shape[1]):
        gates = x[:, t] @ layer["kernel"] + output @ layer["recurrent_kernel"] + np.asarray(layer["bias"])
        into, forget, new, out = (gates[:, i * features : (i + 1) * features] for i in range(4))
        cell = sigmoid(forget) * cell + sigmoid(into) * np.tanh(new)
        output = sigmoid(out) * np.tanh(cell)
        outputs.append(output)
    return np.stack(outputs, 1)


def test_an_lstm_is_not_for_one_label_a_sequence():
    with pytest.raises(ValueError, match="lstm predicts the next token at each place"):
        nn.lstm((5,), embedding=3).metrics(jnp.zeros((2, 7, 4)), jnp.zeros(2, jnp.int32), jnp.ones(2, bool))


def test_an_lstm_by_hand():
    model = nn.lstm((5, 4), embedding=3)
    variables = random_variables(model, NEWS)
    params = jax.tree.map(np.asarray, variables.params)
    tokens = jax.random.randint(KEY, (2, 6), 0, 11)
    hidden = params["embedding"]["embedding"][np.asarray(tokens)]
    for name in ("lstm_0", "lstm_1"):
        hidden = numpy_lstm(hidden, params[name])
    expected = hidden @ params["output"]["kernel"] + params["output"]["bias"]
    outputs, _ = jax.jit(lambda v, x: model.apply(v, x, train=True))(variables, tokens)
    chex.assert_trees_all_close(outputs, expected.astype(np.float32), rtol=1e-4, atol=1e-5)


def looped(inputs, kernel):
    """The recurrence as an ordinary loop, which JAX differentiates by itself."""
    cell = output = jnp.zeros((inputs.shape[1], kernel.shape[0]))
    outputs = []
    for given in inputs:
        into, forget, new, out = jnp.split(given + output @ kernel, 4, -1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
        output = jax.nn.sigmoid(out) * jnp.tanh(cell)
        outputs.append(output)
    return jnp.stack(outputs)


@pytest.mark.slow
def test_derivatives_of_an_lstm_are_those_of_its_loop():
    rng = np.random.default_rng(0)
    point, direction = (
        tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((4, 3, 20), (5, 20))) for _ in range(2)
    )

    @partial(jax.jit, static_argnums=0)
    def derivatives(function):
        gradients = jax.grad(lambda *at: jnp.sum(jnp.sin(function(*at))), (0, 1))
        along = jax.grad(lambda *at: sum(map(jnp.vdot, gradients(*at), direction)), (0, 1))
        return jax.jvp(function, point, direction), gradients(*point), along(*point)

    chex.assert_trees_all_close(derivatives(recurrence), derivatives(looped), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_perplexity():
    """A uniform guess over the vocabulary has its size as perplexity."""
    model = nn.lstm((2,), embedding=2)
    tokens = jnp.zeros((3, 6), jnp.int32)
    scores = model.metrics(model.predict(jnp.zeros((3, 6, 11))), tokens, jnp.array([True, True, False]))
    np.testing.assert_allclose(scores["perplexity"], 11.0, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["torch", "flax"])
def test_start_of_an_lstm(scheme):
    params = jax.jit(lambda key: nn.lstm((64,), embedding=8, init=scheme).init(key, NEWS))(KEY).params["lstm_0"]
    recurrent = np.asarray(params["recurrent_kernel"])
    if scheme == "torch":
        for leaf in params.values():
            assert 0.95 / 8 < np.abs(leaf).max() <= 1 / 8
    else:
        np.testing.assert_allclose(recurrent @ recurrent.T, np.eye(64), atol=1e-4)
        assert not params["bias"].any()


@pytest.mark.slow
@needs_two
def test_an_lstm_on_a_mesh():
    """A loop inside `shard_map` refuses a carry that varies over devices only after its first step."""
    model = nn.lstm((3,), embedding=2)
    variables = random_variables(model, NEWS)
    tokens = jax.random.randint(KEY, (4, 2, 6), 0, 11)
    mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def gradients(tokens):
        def one(tokens):
            return jax.grad(
                lambda p: model.loss(model.apply(variables._replace(params=p), tokens, train=True)[0], tokens).sum()
            )(jax.tree.map(lambda leaf: leaf + 0.0 * tokens.sum().astype(jnp.float32), variables.params))

        return jax.lax.map(one, tokens)

    mapped = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=P("clients"), out_specs=P("clients")))(tokens)
    chex.assert_tree_all_finite(mapped)
    chex.assert_trees_all_close(mapped, jax.jit(gradients)(tokens), rtol=1e-4, atol=1e-6)


# ---- The autoencoder.


def test_the_autoencoder_of_the_paper():
    """4.2 million parameters at 1024, the shared encoder and the decoder by name, and every kernel of its size."""
    info = DatasetInfo("csi", (2, 32, 32), 0, "reconstruction")
    params = jax.eval_shape(lambda key: nn.csi_autoencoder(1024).init(key, info), KEY).params
    assert set(params) == {"encoder", "decoder"}
    assert 4.15e6 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 4.25e6
    kernels = [leaf.shape for leaf in jax.tree.leaves(params["encoder"]) if len(leaf.shape) == 4]
    assert sorted(kernels) == sorted(
        [(3, 3, 2, 2), (1, 9, 2, 2), (9, 1, 2, 2), (3, 3, 2, 2), (3, 3, 2, 2), (1, 3, 2, 2), (3, 1, 2, 2), (1, 1, 6, 2)]
    )
    for i, width in enumerate((9, 7, 5)):
        assert params["decoder"][f"block_{i}_tall_2"]["kernel"].shape == (9, 1, width, width)
        assert params["decoder"][f"block_{i}_merge"]["kernel"].shape == (1, 1, 2 * width, 2)


@pytest.mark.slow
def test_the_autoencoder_returns_matrices():
    """Channels first, like its input; and the decoder sees nothing but the code."""
    model = nn.csi_autoencoder(3)
    variables = random_variables(model, CSI)
    x = jax.random.normal(KEY, (4, 2, 8, 8))
    silent = variables.params | {"encoder": jax.tree.map(jnp.zeros_like, variables.params["encoder"])}
    run = jax.jit(lambda params: model.apply(variables._replace(params=params), x, train=False)[0])
    chex.assert_equal_shape([run(variables.params), x])
    assert np.ptp(run(variables.params), axis=0).min() > 0
    np.testing.assert_allclose(np.ptp(run(silent), axis=0), 0, atol=1e-5)


def test_nmse_is_a_ratio():
    model = nn.csi_autoencoder(4)
    pixels = np.arange(1, 33, dtype=np.uint8).reshape(1, 2, 4, 4)  # which models divide by 255
    assert model.metrics(jnp.asarray(pixels / 255, jnp.float32), pixels, jnp.ones(1, bool))["nmse"] < 1e-9
    y = jax.random.normal(KEY, (3, 2, 4, 4)).at[2].set(0.0)
    outputs = y + jnp.array([0.1, 0.2, 0.3]).reshape(3, 1, 1, 1)
    scores = model.metrics(outputs, y, jnp.array([True, True, False]))
    # Nor does a third, of zeros, count where it is no padding.
    all_three = model.metrics(outputs, y, jnp.array([True, True, True]))
    np.testing.assert_allclose(all_three["nmse"], scores["nmse"], rtol=1e-6)
    expected = np.mean([32 * e**2 / np.sum(np.asarray(y[i]) ** 2) for i, e in enumerate((0.1, 0.2))])
    np.testing.assert_allclose(scores["nmse"], expected, rtol=1e-4)
    np.testing.assert_allclose(scores["loss"], (0.01 + 0.04) / 2, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: nn.resnet18(0), "width"),
        (lambda: nn.mobilenet_v2(-1.0), "width"),
        (lambda: nn.mobilenet_v2(dropout=1.0), "dropout"),
        (lambda: nn.lstm(init="keras"), "keras"),
        (lambda: nn.lstm(dropout=-0.1), "dropout"),
        (lambda: nn.lstm().init(KEY, SMALL), "integers"),
        (lambda: nn.csi_autoencoder(0), "latent"),
        (lambda: nn.csi_autoencoder().init(KEY, DatasetInfo("flat", (8,), 0, "reconstruction")), "2, H, W"),
    ],
)
def test_mistakes_raise(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
