"""Models are values: equal arguments give equal models, which hash equally and share one compiled program."""

import dataclasses
import functools

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import pytest

from fedjax_cluster import nn
from fedjax_cluster.nn.embedding import apply_with_embedding
from fedjax_cluster.nn.initializers import Uniform
from fedjax_cluster.types import DatasetInfo

DIGITS = DatasetInfo("digits", (8, 8), 10)
IMAGES = DatasetInfo("images", (16, 16, 3), 5)
NEWS = DatasetInfo("news", (6,), 11, "language")
CSI = DatasetInfo("csi", (2, 8, 8), 0, "reconstruction")


class Head(linen.Module):
    num_outputs: int
    width: int = 3

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.num_outputs, name="output")(linen.Dense(self.width)(x.reshape(x.shape[0], -1)))


# Common to most factories: each differs from the default.
COMMON = {"loss": "mse", "normalize": (0.1, 0.2), "num_outputs": 30}
DENSE = {"init": "flax", **COMMON}

# Per factory: arguments, an argument that differs from them in each way, and the data it is built for.
FACTORIES = {
    "linear": (
        nn.linear,
        {"init_scale": 0.8},
        DENSE | {"init_scale": 0.7, "use_bias": False, "zero_bias": True},
        DIGITS,
    ),
    "mlp": (nn.mlp, {"hidden": [16]}, DENSE | {"hidden": (17,)}, DIGITS),
    "cnn": (
        nn.cnn,
        {"channels": [2], "dense": [4], "kernel_size": [3], "normalize": [[0.5], 0.2]},
        DENSE | {"channels": (3,), "dense": (5,), "kernel_size": 5, "pool": 1, "padding": "VALID"},
        DIGITS,
    ),
    "lenet5": (nn.lenet5, {}, DENSE | {"padding": "SAME"}, IMAGES),
    "resnet18": (nn.resnet18, {"width": 2, "blocks": [1, 1]}, DENSE | {"width": 3, "blocks": (1,)}, IMAGES),
    "mobilenet_v2": (
        nn.mobilenet_v2,
        {"width": 0.1, "small_images": True},
        DENSE | {"width": 0.2, "small_images": False, "dropout": 0.0},
        IMAGES,
    ),
    "csi_autoencoder": (nn.csi_autoencoder, {"latent": 3}, {"latent": 4}, CSI),
    "lstm": (
        nn.lstm,
        {"hidden": [3], "embedding": 2},
        {"hidden": (4,), "embedding": 3, "dropout": 0.1, "init": "flax", "num_outputs": 12},
        NEWS,
    ),
    "from_flax": (
        lambda width=3, **options: nn.from_flax(nn.Sized(Head, width=width), **options),
        {},
        COMMON | {"width": 4},
        DIGITS,
    ),
    "from_flax of a module": (
        lambda outputs=10, **options: nn.from_flax(Head(outputs), **options),
        {},
        COMMON | {"outputs": 11},
        DIGITS,
    ),
    "from_flax of a class": (functools.partial(nn.from_flax, Head), {}, COMMON, DIGITS),
    "mixed_precision": (
        lambda precision="bfloat16", **options: nn.mixed_precision(nn.mlp(**options), precision),
        {"hidden": [4]},
        DENSE | {"hidden": (5,), "precision": "float32"},
        DIGITS,
    ),
}


def with_tuples(value):
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
def test_equal_arguments_give_one_value_and_one_trace(name):
    make, arguments, _, info = FACTORIES[name]
    first, second = make(**arguments), make(**{key: with_tuples(value) for key, value in arguments.items()})
    assert first == second
    assert hash(first) == hash(second)
    chex.clear_trace_counter()

    @functools.partial(jax.jit, static_argnames="model")
    @chex.assert_max_traces(n=1)
    def run(key, model):
        variables = model.init(key, info)
        x = jnp.zeros((2, *info.input_shape), jnp.int32 if info.task == "language" else jnp.float32)
        outputs, stats = model.apply(variables, x, train=True, rng_key=key)
        predictions = model.predict(outputs)
        y = predictions if info is CSI else jnp.zeros((2, 6) if info is NEWS else 2, jnp.int32)
        return model.loss(outputs, y), model.metrics(predictions, y, jnp.ones(2, bool)), stats

    with jax.numpy_dtype_promotion("standard"):  # Flax's batch norm mixes its float32 statistics in
        shapes = [jax.eval_shape(functools.partial(run, model=model), jax.random.key(0)) for model in (first, second)]
    chex.assert_trees_all_equal_shapes_and_dtypes(*shapes)


DIFFERENCES = [(name, option) for name, (_, _, others, _) in FACTORIES.items() for option in others]


@pytest.mark.parametrize(("name", "option"), DIFFERENCES)
def test_any_other_argument_gives_another_value(name, option):
    make, arguments, others, _ = FACTORIES[name]
    assert make(**arguments) != make(**arguments | {option: others[option]})


def test_functions_and_unhashable_modules_are_equal_to_themselves_alone():
    def build(outputs):
        return Head(outputs)

    def rebuild(outputs):
        return Head(outputs)

    assert nn.from_flax(build) == nn.from_flax(build)
    assert nn.from_flax(build) != nn.from_flax(rebuild)
    layers = linen.Sequential([linen.Dense(10)])  # holds a list, so that it cannot be hashed
    model = nn.from_flax(layers)
    assert len({model, nn.from_flax(layers)}) == 2
    variables = model.init(jax.random.key(0), DatasetInfo("table", (4,), 10))
    chex.assert_shape(model.apply(variables, jnp.ones((2, 4)), train=False)[0], (2, 10))


def test_a_replaced_function_makes_another_value():
    model = nn.mlp()
    assert model._replace(metrics=len) != model
    assert model._replace(metrics=len) == nn.mlp()._replace(metrics=len)


def test_initialisers_are_values():
    assert Uniform(0.5) == Uniform(0.5)
    assert hash(Uniform(0.5)) == hash(Uniform(0.5))
    assert Uniform(0.5) != Uniform(0.25)
    assert nn.linear(init_scale=0.8) == nn.linear(kernel_init=Uniform(0.8))
    assert nn.linear(kernel_init=linen.initializers.ones) == nn.linear(kernel_init=linen.initializers.ones)


def test_fewer_outputs_than_classes_are_refused_before_any_training():
    with pytest.raises(ValueError, match="Head gives 9 outputs, but digits has 10 classes"):
        nn.from_flax(Head(9)).init(jax.random.key(0), DIGITS)
    nn.from_flax(Head(9), loss="mse").init(jax.random.key(0), CSI)
    nn.from_flax(Head(12)).init(jax.random.key(0), DIGITS)


def test_a_field_that_a_module_does_not_have_is_named():
    with pytest.raises(ValueError, match="Head has no field widht; it has width"):
        nn.Sized(Head, widht=4)


def test_a_class_that_cannot_be_built_is_said_at_once():
    """Faults: Flax's TypeError in the first round; an IndexError of models that name their inputs; a division by 0."""

    class Named(linen.Module):
        width: int

        @linen.compact
        def __call__(self, x):
            x = nn.Conv(self.width, 1, feature_group_count=self.width - 3)(x[..., None])
            return linen.Dense(10, name="output")(inputs=x.reshape(len(x), -1))

    class Needy(Named):
        num_outputs: int = 10
        depth: int = dataclasses.field(default=2)

    with pytest.raises(ValueError, match="Named has no field num_outputs; add it"):
        nn.Sized(Named, width=4)
    with pytest.raises(ValueError, match="Needy has a field width without a default; give it"):
        nn.Sized(Needy)
    model = nn.from_flax(nn.Sized(Needy, width=4))
    variables = model.init(jax.random.key(0), DIGITS)
    (outputs, embedding), _ = apply_with_embedding(model, variables, jnp.ones((2, *DIGITS.input_shape)), train=False)
    assert (outputs.shape, embedding.ndim) == ((2, 10), 2)
    with pytest.raises(ValueError, match="feature_group_count is 0; it must be a whole number, at least 1"):
        nn.from_flax(nn.Sized(Needy, width=3)).init(jax.random.key(0), DIGITS)


def test_tokens_that_would_be_scaled_as_pixels_are_named():
    """The layer's own message says that its input must be an unsigned integer, which it was."""

    class Tokens(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3, name="output")(linen.Embed(30, 4)(x).mean(1))

    model = nn.from_flax(Tokens())
    variables = model.init(jax.random.key(0), DatasetInfo("texts", (5,), 3))
    tokens = jnp.arange(10).reshape(2, 5)
    assert model.apply(variables, tokens.astype(jnp.uint16), train=False)[0].shape == (2, 3)
    with pytest.raises(ValueError, match="Tokens takes integers, but x is uint8, which is taken for pixels"):
        model.apply(variables, tokens.astype(jnp.uint8), train=False)
