"""The models: names, sizes, initial weights, inputs, and what they compute."""

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_cluster import nn
from fedjax_cluster.types import DatasetInfo, Variables

DIGITS = DatasetInfo("digits", (8, 8), 10)
MNIST = DatasetInfo("mnist", (28, 28), 10)
CIFAR = DatasetInfo("cifar", (32, 32, 3), 100)
LINE = DatasetInfo("line", (3,), 0, "regression")
KEY = jax.random.key(0)


def shapes(tree):
    paths, _ = jax.tree.flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in paths}


@pytest.mark.parametrize(
    ("model", "info", "expected"),
    [
        (nn.linear(), LINE, {"output/bias": (1,), "output/kernel": (3, 1)}),
        (nn.linear(use_bias=False, num_outputs=4, loss="mse"), LINE, {"output/kernel": (3, 4)}),
        (
            nn.mlp((200,)),
            MNIST,
            {"hidden_0/bias": (200,), "hidden_0/kernel": (784, 200), "output/bias": (10,), "output/kernel": (200, 10)},
        ),
        (
            nn.cnn(),
            MNIST,
            {
                "conv_0/bias": (32,),
                "conv_0/kernel": (5, 5, 1, 32),
                "conv_1/bias": (64,),
                "conv_1/kernel": (5, 5, 32, 64),
                "hidden_0/bias": (512,),
                "hidden_0/kernel": (3136, 512),
                "output/bias": (10,),
                "output/kernel": (512, 10),
            },
        ),
        (
            nn.cnn((4,), kernel_size=3, dense=(), padding="VALID"),
            CIFAR,
            {"conv_0/bias": (4,), "conv_0/kernel": (3, 3, 3, 4), "output/bias": (100,), "output/kernel": (900, 100)},
        ),
        (  # Fig. 3 of gradient-and-loss CFL, EMNIST: 28 − 4 − 2 = 22, pooled once
            nn.cnn(kernel_size=(5, 3), pool=(1, 2), dense=(128,), padding="VALID"),
            DatasetInfo("emnist", (28, 28), 47),
            {
                "conv_0/bias": (32,),
                "conv_0/kernel": (5, 5, 1, 32),
                "conv_1/bias": (64,),
                "conv_1/kernel": (3, 3, 32, 64),
                "hidden_0/bias": (128,),
                "hidden_0/kernel": (11 * 11 * 64, 128),
                "output/bias": (47,),
                "output/kernel": (128, 47),
            },
        ),
        (
            nn.lenet5(),
            CIFAR,
            {
                "conv_0/bias": (6,),
                "conv_0/kernel": (5, 5, 3, 6),
                "conv_1/bias": (16,),
                "conv_1/kernel": (5, 5, 6, 16),
                "hidden_0/bias": (120,),
                "hidden_0/kernel": (400, 120),
                "hidden_1/bias": (84,),
                "hidden_1/kernel": (120, 84),
                "output/bias": (100,),
                "output/kernel": (84, 100),
            },
        ),
    ],
)
def test_layers(model, info, expected):
    variables = jax.eval_shape(lambda key: model.init(key, info), KEY)
    assert shapes(variables.params) == expected
    assert variables.stats == {}
    x = jnp.ones((2, *info.input_shape))
    outputs, stats = jax.eval_shape(lambda v: model.apply(v, x, train=True, rng_key=KEY), variables)
    chex.assert_shape(outputs, (2, expected["output/kernel"][-1]))
    chex.assert_type(outputs, jnp.float32)
    assert stats == {}


def layers_with_fan_in(params):
    for layer in params.values():
        yield layer["kernel"], layer["bias"], np.prod(layer["kernel"].shape[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("model", [nn.mlp((50,)), nn.cnn((16,), dense=())])
def test_initialisation_of_torch(model):
    """Kernel and bias fill ±1/√fan_in evenly: the bound is nearly reached, the variance is a third of its square."""
    params, _ = model.init(KEY, MNIST)
    for kernel, bias, fan_in in layers_with_fan_in(params):
        bound = 1 / np.sqrt(fan_in)
        for values in (kernel, bias):
            assert np.abs(values).max() <= bound
            assert np.abs(values).max() > bound * (1 - 10 / values.size)
        assert abs(np.var(kernel) / (bound**2 / 3) - 1) < 8 / np.sqrt(kernel.size)
        assert abs(np.mean(kernel)) < 5 * bound / np.sqrt(3 * kernel.size)


def test_initialisation_of_flax():
    params, _ = nn.cnn((16,), dense=(), init="flax").init(KEY, MNIST)
    for kernel, bias, fan_in in layers_with_fan_in(params):
        kernel = np.asarray(kernel)
        assert not bias.any()
        assert abs(np.var(kernel) * fan_in - 1) < 8 / np.sqrt(kernel.size)
        assert np.abs(kernel).max() > 1.5 / np.sqrt(fan_in)  # beyond the bound of the uniform rule


@pytest.mark.parametrize("scale", [0.8, 1.6])
def test_initialisation_of_the_linear_regression(scale):
    info = DatasetInfo("line", (4000,), 0, "regression")
    params, _ = nn.linear(init_scale=scale, zero_bias=True).init(KEY, info)
    assert 0.99 * scale < np.abs(params["output"]["kernel"]).max() <= scale
    assert not params["output"]["bias"].any()
    params, _ = nn.linear(kernel_init=linen.initializers.ones).init(KEY, info)
    assert (params["output"]["kernel"] == 1).all()
    assert params["output"]["bias"].any()


def test_models_differ_by_key_and_stack_under_vmap():
    model = nn.mlp((5,))
    stacked = jax.vmap(lambda key: model.init(key, DIGITS))(jax.random.split(KEY, 3)).params
    kernel = stacked["hidden_0"]["kernel"]
    chex.assert_shape(kernel, (3, 64, 5))
    assert not np.allclose(kernel[0], kernel[1])
    again = model.init(jax.random.split(KEY, 3)[1], DIGITS).params
    chex.assert_trees_all_close(kernel[1], again["hidden_0"]["kernel"], rtol=1e-6)


def test_an_mlp_computes_relu_layers():
    model = nn.mlp((7, 6))
    variables = model.init(KEY, DIGITS)
    x = jax.random.normal(KEY, (5, 8, 8))
    hidden = x.reshape(5, 64)
    for name in ("hidden_0", "hidden_1"):
        hidden = np.maximum(hidden @ variables.params[name]["kernel"] + variables.params[name]["bias"][None], 0)
    expected = hidden @ variables.params["output"]["kernel"] + variables.params["output"]["bias"][None]
    chex.assert_trees_all_close(model.apply(variables, x, train=False)[0], expected, rtol=1e-4, atol=1e-5)


class FlaxCnn(linen.Module):
    """The convolutional network in Flax's layers, rectified before the pooling as the paper says."""

    @linen.compact
    def __call__(self, x):
        x = x[..., None]
        for i, features in enumerate((4, 6)):
            x = linen.relu(linen.Conv(features, (5, 5), name=f"conv_{i}")(x))
            x = linen.max_pool(x, (2, 2), strides=(2, 2))
        x = linen.relu(linen.Dense(9, name="hidden_0")(x.reshape(x.shape[0], -1)))
        return linen.Dense(10, name="output")(x)


@pytest.mark.slow
@pytest.mark.usefixtures("compilation")
def test_the_cnn_is_that_of_flax_with_its_gradients():
    ours, flax = nn.cnn((4, 6), dense=(9,)), nn.from_flax(FlaxCnn())
    keys = jax.random.split(KEY, 3)
    variables = jax.vmap(lambda key: ours.init(key, MNIST))(keys)
    x = jax.random.normal(KEY, (3, 2, 28, 28))
    y = jnp.arange(6).reshape(3, 2)

    def loss_and_gradient(model):
        def one(variables, x, y):
            return jax.value_and_grad(
                lambda params: model.loss(model.apply(Variables(params, variables.stats), x, train=True)[0], y).sum()
            )(variables.params)

        return jax.jit(jax.vmap(one))(variables, x, y)

    (value, gradient), (expected, expected_gradient) = loss_and_gradient(ours), loss_and_gradient(flax)
    chex.assert_trees_all_close(value, expected, rtol=1e-5)
    largest = jax.tree.map(lambda leaf: jnp.abs(leaf).max(), expected_gradient)
    relative = (jax.tree.map(jnp.divide, tree, largest) for tree in (gradient, expected_gradient))
    chex.assert_trees_all_close(*relative, rtol=0, atol=2e-5)


# ---- Inputs.


def test_bytes_are_scaled_and_normalised():
    pixels = jax.random.randint(KEY, (2, 8, 8), 0, 256, jnp.uint8)
    plain, normalised = nn.mlp((5,)), nn.mlp((5,), normalize=(0.5, 0.25))
    variables = plain.init(KEY, DIGITS)
    by_hand = pixels.astype(jnp.float32) / 255.0
    expected = plain.apply(variables, by_hand, train=False)[0]
    chex.assert_trees_all_close(plain.apply(variables, pixels, train=False)[0], expected, rtol=1e-6)
    expected = plain.apply(variables, (by_hand - 0.5) / 0.25, train=False)[0]
    chex.assert_trees_all_close(normalised.apply(variables, pixels, train=False)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_normalising_by_channel():
    model = nn.cnn((2,), dense=(), normalize=((0.1, 0.2, 0.3), (1.0, 2.0, 4.0)))
    plain = nn.cnn((2,), dense=())
    variables = plain.init(KEY, CIFAR)
    x = jax.random.normal(KEY, (2, 32, 32, 3))
    mean, deviation = (np.array(part, np.float32).reshape(1, 1, 1, 3) for part in ((0.1, 0.2, 0.3), (1, 2, 4)))
    outputs, expected = (
        made.apply(variables, inputs, train=False)[0] for made, inputs in ((model, x), (plain, (x - mean) / deviation))
    )
    chex.assert_trees_all_close(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [nn.linear(), nn.mlp((3,)), nn.cnn((2,), kernel_size=3, dense=())])
def test_no_rows_give_no_outputs(model):
    """They divided by zero."""
    variables = model.init(KEY, DIGITS)
    assert model.apply(variables, jnp.zeros((0, 8, 8)), train=False)[0].shape == (0, 10)


def test_images_with_and_without_a_channel_axis():
    model = nn.cnn((2,), dense=())
    variables = model.init(KEY, DIGITS)
    x = jax.random.normal(KEY, (2, 8, 8))
    outputs, expected = (model.apply(variables, inputs, train=False)[0] for inputs in (x, x[..., None]))
    chex.assert_trees_all_equal(outputs, expected)


# ---- Any Flax module.


class Modern(linen.Module):
    """With batch statistics, dropout and a mode."""

    @linen.compact
    def __call__(self, x, train: bool = False):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return linen.Dense(3)(linen.Dropout(0.5, deterministic=not train)(x))


class ByDeterministic(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic: bool):
        return linen.Dense(3)(linen.Dropout(0.9)(x, deterministic=deterministic))


class ByTraining(linen.Module):
    @linen.compact
    def __call__(self, x, *, training):
        return linen.Dropout(0.5)(linen.Dense(3, use_bias=False)(x), deterministic=not training)


class Twofold(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x), x


class OfNnx(nnx.Module):
    def __call__(self, x):
        return x


class AlwaysTraining(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(x)


class Remembering(linen.Module):
    @linen.compact
    def __call__(self, x):
        self.variable("memory", "last", jnp.zeros, ())
        return linen.Dense(2)(x)


class WithoutOutput(linen.Module):
    num_outputs: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.num_outputs, name="head")(x)


TABLE = DatasetInfo("table", (4,), 3)


def test_batch_statistics_and_dropout():
    model = nn.from_flax(Modern())
    variables = model.init(KEY, TABLE)
    assert set(variables.stats) == {"BatchNorm_0"}
    x = 5.0 + jax.random.normal(KEY, (64, 4))
    (a, stats), (b, _) = (model.apply(variables, x, train=True, rng_key=jax.random.key(i)) for i in (1, 2))
    assert not np.allclose(a, b)
    np.testing.assert_allclose(stats["BatchNorm_0"]["mean"], 0.5 * np.asarray(x).mean(0), rtol=1e-5)
    chex.assert_trees_all_equal_structs(stats, variables.stats)
    (a, same), (b, _) = (model.apply(variables, x, train=False, rng_key=jax.random.key(i)) for i in (1, 2))
    chex.assert_trees_all_equal(a, b)
    assert same is variables.stats


@pytest.mark.parametrize("module", [ByDeterministic(), ByTraining()], ids=["deterministic", "training"])
def test_other_names_of_the_flag(module):
    model = nn.from_flax(module)
    variables = model.init(KEY, TABLE)
    x = jnp.ones((2, 4))
    kept = model.apply(variables, x, train=False)[0]
    chex.assert_trees_all_close(kept, x @ variables.params["Dense_0"]["kernel"], rtol=1e-5)
    assert not np.allclose(model.apply(variables, x, train=True, rng_key=KEY)[0], kept)


def test_statistics_that_change_outside_of_training_are_refused():
    model = nn.from_flax(AlwaysTraining())
    variables = model.init(KEY, TABLE)
    assert model.apply(variables, jnp.ones((2, 4)), train=True)[0].shape == (2, 4)
    with pytest.raises(ValueError, match="AlwaysTraining changes its batch statistics outside of training; let its"):
        model.apply(variables, jnp.ones((2, 4)), train=False)


def test_other_collections_are_refused():
    with pytest.raises(ValueError, match="memory"):
        nn.from_flax(Remembering()).init(KEY, TABLE)


@pytest.mark.parametrize(
    ("module", "error", "complaint"),
    [
        (OfNnx(), TypeError, "OfNnx is a module of Flax nnx"),
        (OfNnx, TypeError, "OfNnx is a module of Flax nnx"),
        (Twofold(), ValueError, "Twofold gives a tuple; a model gives one array"),
        (Twofold, ValueError, r"Twofold\(3\) fails: .*; give from_flax a module, such as Twofold\(\), or Sized"),
        (lambda outputs: jnp.zeros(outputs), ValueError, r"<lambda>\(3\) is a .*; from_flax takes a Flax module"),
    ],
)
def test_what_is_no_linen_module_of_one_array_is_refused(module, error, complaint):
    with pytest.raises(error, match=complaint):
        nn.from_flax(module).init(KEY, TABLE)


def test_a_sized_module_needs_an_output_layer():
    model = nn.from_flax(WithoutOutput)
    variables = model.init(KEY, TABLE)
    with pytest.raises(ValueError, match="'head'"):
        model.apply(variables, jnp.ones((2, 4)), train=False)


# ---- Mistakes.


def apply_to_digits(model):
    variables = jax.eval_shape(lambda key: model.init(key, DIGITS), KEY)
    return jax.eval_shape(lambda v: model.apply(v, jnp.ones((2, 8, 8)), train=False), variables)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: nn.mlp(init="keras"), "keras"),
        (lambda: nn.mlp((0,)), "hidden"),
        (lambda: nn.cnn((4, -1)), "channels"),
        (lambda: nn.cnn(kernel_size=0), "kernel_size"),
        (lambda: nn.cnn(kernel_size=(3, 3, 3)), "kernel_size has 3 entries for 2 layers"),
        (lambda: nn.cnn(pool=(0, 2)), "pool"),
        (lambda: nn.lenet5(loss="hinge"), "hinge"),
        (lambda: nn.linear(init_scale=0.8, kernel_init=linen.initializers.ones), "kernel_init"),
        (lambda: nn.linear(init_scale=-1.0), "init_scale is -1"),
        (lambda: nn.mlp().init(KEY, DatasetInfo("none", (4,), 1)), "num_classes"),
        (lambda: nn.mlp().init(KEY, DatasetInfo("pictures", (4, 4), 0, "reconstruction")), "loss='mse'"),
        (lambda: nn.lenet5().init(KEY, DIGITS), "does not fit"),
        (lambda: nn.cnn((4, 4, 4, 4)).init(KEY, DIGITS), "does not fit"),
        (lambda: nn.cnn().init(KEY, DatasetInfo("flat", (784,), 10)), "N, H, W"),
        (lambda: apply_to_digits(nn.mlp((2,), normalize=((0.1, 0.2, 0.3), 1.0))), "normalize"),
    ],
)
def test_mistakes_raise(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


class Tokens(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3, dtype=jnp.bfloat16, name="output")(linen.Embed(10, 4)(x).mean(1))


def test_a_module_that_takes_integers_alone_starts_with_some_and_gives_single_precision():
    model, info = nn.from_flax(Tokens()), DatasetInfo("words", (6,), 3)
    variables = model.init(KEY, info)
    outputs, _ = model.apply(variables, jnp.arange(12).reshape(2, 6) % 10, train=False)
    assert (outputs.shape, outputs.dtype) == ((2, 3), jnp.float32)
    # What is wrong with both is told of numbers, which most modules take.
    with pytest.raises(ValueError, match="3 outputs, but words has 4 classes"):
        model.init(KEY, info._replace(num_classes=4))
    with pytest.raises(TypeError, match="float32"):
        nn.from_flax(Refusing()).init(KEY, info)


class Refusing(linen.Module):
    @linen.compact
    def __call__(self, x):
        raise TypeError(f"no {x.dtype}")
