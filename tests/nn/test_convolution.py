"""Convolution against XLA's: values, gradients of first and second order, under every map over clients."""

import functools

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from fedjax_cluster.nn import Conv, convolution
from fedjax_cluster.nn.convolution import _exchanged, _in_pieces, _matrix_product, _on_cpu, _sum_of_shifts, convolve
from fedjax_cluster.nn.windows import Window
from tests.devices import needs_two


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def xla(x, kernel, strides=1, padding="SAME", dilation=1, groups=1):
    return lax.conv_general_dilated(
        x,
        kernel,
        (strides,) * 2 if isinstance(strides, int) else strides,
        padding,
        rhs_dilation=(dilation,) * 2 if isinstance(dilation, int) else dilation,
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def assert_close(actual, expected, tolerance=1e-5):
    """Each leaf within `tolerance` of the largest entry expected in it."""
    sizes = jax.tree.map(lambda leaf: max(np.abs(leaf).max(), 1e-30), expected)
    relative = (jax.tree.map(lambda leaf, size: np.asarray(leaf) / size, tree, sizes) for tree in (actual, expected))
    chex.assert_trees_all_close(*relative, rtol=0, atol=tolerance)


# ---- Values and gradients.


CASES = {
    "a few channels": {"channels": 1, "features": 6, "kernel": 5},
    "few features": {"channels": 12, "features": 3, "kernel": 3},
    "many of both": {"channels": 20, "features": 24, "kernel": 3},
    "wide patches, which go by images": {"channels": 230, "features": 3, "kernel": 3},
    "wide patches and strides": {"channels": 230, "features": 3, "kernel": 3, "strides": (1, 2)},
    "larger than the image": {"channels": 2, "features": 3, "kernel": 11},
    "valid": {"channels": 20, "features": 24, "kernel": 5, "padding": "VALID"},
    "strides": {"channels": 20, "features": 24, "kernel": 3, "strides": 2},
    "strides beyond the kernel": {"channels": 3, "features": 20, "kernel": 2, "strides": 3, "padding": "VALID"},
    "unequal strides": {"channels": 3, "features": 5, "kernel": 3, "strides": (1, 2)},
    "explicit padding": {"channels": 4, "features": 17, "kernel": 3, "padding": ((1, 2), (0, 3))},
    "dilation": {"channels": 20, "features": 24, "kernel": 3, "dilation": 2},
    "dilation and strides": {
        "channels": 3,
        "features": 5,
        "kernel": 3,
        "dilation": (1, 2),
        "strides": 2,
        "padding": "VALID",
    },
    "pointwise": {"channels": 9, "features": 7, "kernel": 1},
    "pointwise with strides": {"channels": 9, "features": 7, "kernel": 1, "strides": 2},
    "pointwise with padding": {"channels": 9, "features": 7, "kernel": 1, "padding": ((1, 1), (0, 2))},
    "as large as the image": {"channels": 3, "features": 5, "kernel": (10, 9), "padding": "VALID"},
    "groups": {"channels": 4, "features": 6, "kernel": 3, "groups": 2},
    "depthwise": {"channels": 5, "features": 5, "kernel": 3, "groups": 5, "strides": 2},
    "depthwise, two features a channel": {"channels": 3, "features": 6, "kernel": 3, "groups": 3},
}


def operands(case, batch=3):
    size = case["kernel"] if isinstance(case["kernel"], tuple) else (case["kernel"],) * 2
    x = normal(batch, 10, 9, case["channels"])
    kernel = normal(*size, case["channels"] // case.get("groups", 1), case["features"], seed=1)
    return x, kernel


@pytest.mark.usefixtures("compilation")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_xla(name):
    case = CASES[name]
    x, kernel = operands(case)
    options = {k: case[k] for k in ("strides", "padding", "dilation", "groups") if k in case}
    renamed = {"dilation": "kernel_dilation", "groups": "feature_group_count"}
    our_options = {renamed.get(k, k): v for k, v in options.items()}

    def with_gradients(fn, options):
        @jax.jit
        def run(x, kernel):
            out, pull = jax.vjp(lambda x, kernel: fn(x, kernel, **options), x, kernel)
            return out, pull(jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

        return run(x, kernel)

    assert_close(with_gradients(convolution, our_options), with_gradients(xla, options))


GRADIENT_CASES = [
    {},
    {"strides": 2, "padding": "VALID"},
    {"strides": (1, 3), "padding": ((0, 2), (1, 0))},
    {"kernel_dilation": (2, 1), "padding": 1},
    {"strides": 2, "kernel_dilation": 2, "padding": "VALID"},
    {"feature_group_count": 2},
    {"feature_group_count": 4, "strides": 2, "kernel_dilation": (1, 2)},
]


def check_derivatives(fn, *operands):
    """Of a bilinear function and of its transpose: their central differences are exact for steps of any length."""
    weights = normal(*jax.eval_shape(fn, *operands).shape, seed=9)

    def transpose(*operands):
        return jax.vjp(fn, *operands)[1](weights)

    for run in (fn, transpose):
        check_grads(jax.jit(run), operands, order=1, modes=("fwd", "rev"), atol=2e-5, rtol=2e-5, eps=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("options", GRADIENT_CASES)
def test_gradients_are_those_of_finite_differences(options):
    kernel = normal(3, 2, 4 // options.get("feature_group_count", 1), 4, seed=1)
    check_derivatives(functools.partial(convolution, **options), normal(2, 7, 6, 4), kernel, normal(4, seed=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "window",
    [
        Window(),
        Window((2, 3), ((1, 4), (0, 2)), (1, 1), (1, 2)),
        Window((1, 2), ((3, 2), (1, 1)), (2, 3), (2, 1)),
        Window((1, 1), ((-1, -2), (2, -3)), (2, 1), (1, 1)),
    ],
)
def test_gradients_of_the_primitive_are_those_of_finite_differences(window):
    check_derivatives(functools.partial(convolve, window=window), normal(2, 7, 6, 3), normal(2, 3, 3, 4, seed=1))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": (3, 3)},
        {"kernel_size": (5, 3), "strides": 2, "padding": 1},
        {"kernel_size": (3, 3), "padding": ((0, 1), (2, 0)), "kernel_dilation": 2, "use_bias": False},
        {"kernel_size": (3, 3), "feature_group_count": 2, "padding": "VALID"},
    ],
)
def test_the_layer_stands_in_for_flax(options):
    x = normal(2, 9, 8, 4)
    ours = Conv(6, **options)
    flax = linen.Conv(6, **options)
    variables = flax.init(jax.random.key(0), x)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours.init(jax.random.key(0), x), variables)
    variables = jax.tree.map(lambda leaf: leaf + 0.5, variables)  # a bias that shows
    assert_close(ours.apply(variables, x), flax.apply(variables, x))


def test_the_layer_starts_like_flax():
    x = normal(1, 8, 8, 4)
    ours, flax = (layer(6, kernel_size=(3, 3)).init(jax.random.key(3), x) for layer in (Conv, linen.Conv))
    chex.assert_trees_all_equal(ours, flax)


@pytest.mark.slow
@pytest.mark.parametrize("form", [_matrix_product, _sum_of_shifts, _in_pieces, _exchanged, _on_cpu])
@pytest.mark.parametrize(
    "window",
    [
        Window(),
        Window((2, 3), ((1, 4), (0, 2)), (1, 1), (1, 2)),
        Window((1, 2), ((3, 2), (1, 1)), (2, 3), (2, 1)),
        Window((1, 1), ((-1, -2), (2, -3)), (2, 1), (1, 1)),  # a negative padding crops
    ],
)
@pytest.mark.parametrize("size", [(2, 3), (7, 8)], ids=["small kernel", "small output"])
def test_all_forms_compute_the_same(form, window, size):
    if size == (7, 8):
        window = window._replace(padding=((1, 1), (2, 2)), kernel_dilation=(1, 1))
    x, kernel = normal(2, 7, 6, 3), normal(*size, 3, 4, seed=1)
    expected = lax.conv_general_dilated(
        x,
        kernel,
        *window[:2],
        lhs_dilation=window[2],
        rhs_dilation=window[3],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    assert_close(jax.jit(form, static_argnames="window")(x, kernel, window=window), expected)


sides = st.tuples(st.integers(0, 3), st.integers(0, 3))
steps = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(strides=steps, padding=st.tuples(sides, sides), dilation=steps, kernel=steps)
def test_gradients_are_adjoints(strides, padding, dilation, kernel):
    """⟨conv(x, k), y⟩ = ⟨x, dx(y)⟩ = ⟨k, dk(y)⟩ whatever the window."""
    x, k = normal(2, 8, 7, 2), normal(*kernel, 2, 3, seed=1)

    @jax.jit
    def run(x, k):
        def apply(x, k):
            return convolution(x, k, strides=strides, padding=padding, kernel_dilation=dilation)

        out, pull = jax.vjp(apply, x, k)
        y = jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return out, y, *pull(y)

    out, y, dx, dk = run(x, k)
    expected = float(jnp.vdot(out, y))
    scale = float(jnp.linalg.norm(out.ravel()) * jnp.linalg.norm(y.ravel()))
    assert abs(float(jnp.vdot(x, dx)) - expected) < 1e-5 * scale
    assert abs(float(jnp.vdot(k, dk)) - expected) < 1e-5 * scale


# ---- Second order. Two layers with strides, so that every transpose rule is differentiated again.


def network(conv, kernels, x):
    hidden = jnp.tanh(conv(x, kernels[0], strides=2))
    return jnp.sum(jnp.tanh(conv(hidden, kernels[1], strides=1)) ** 2)


MODES = {
    "forward over reverse": lambda f: lambda k, v: jax.jvp(jax.grad(f), (k,), (v,))[1],
    "reverse over reverse": lambda f: lambda k, v: jax.grad(lambda k: vdot(jax.grad(f)(k), v))(k),
    "reverse over forward": lambda f: lambda k, v: jax.grad(lambda k: jax.jvp(f, (k,), (v,))[1])(k),
}


def vdot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope="module")
def clients():
    kernels = (normal(4, 3, 3, 2, 6), normal(4, 3, 3, 6, 20, seed=1))
    directions = (normal(4, 3, 3, 2, 6, seed=2), normal(4, 3, 3, 6, 20, seed=3))
    return kernels, directions, normal(4, 2, 8, 8, 2, seed=4)


def hessian_times_vector(conv, mode):
    return lambda kernels, v, x: MODES[mode](lambda k: network(conv, k, x))(kernels, v)


@pytest.mark.slow
@pytest.mark.usefixtures("compilation")
@pytest.mark.parametrize("mode", MODES)
def test_hessian_times_vector(clients, mode):
    ours, reference = (hessian_times_vector(conv, mode) for conv in (convolution, xla))
    expected = jax.jit(jax.vmap(reference))(*clients)
    assert_close(jax.jit(jax.vmap(ours))(*clients), expected)
    assert_close(jax.jit(lambda c: lax.map(lambda row: ours(*row), c))(clients), expected)


@pytest.mark.slow
def test_gradient_through_local_steps(clients):
    """Per-FedAvg's exact gradient: through a scan of SGD steps, each with its gradient."""
    kernels, x = jax.tree.map(lambda kernel: 0.3 * kernel, clients[0]), clients[2]

    def after_two_steps(conv, kernels, x):
        def step(k, _):
            return jax.tree.map(lambda k, g: k - 0.01 * g, k, jax.grad(lambda k: network(conv, k, x))(k)), None

        return network(conv, lax.scan(step, kernels, None, length=2)[0], x)

    ours, reference = (
        jax.jit(jax.vmap(jax.grad(lambda k, x, conv=conv: after_two_steps(conv, k, x))))(kernels, x)
        for conv in (convolution, xla)
    )
    assert_close(ours, reference)


# ---- Maps over clients.


def value_and_gradients(conv):
    return lambda x, kernel: jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(conv(*a))), argnums=(0, 1))(x, kernel)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 3)])
def test_vmap(axes):
    x, kernel = normal(2, 6, 6, 3), normal(3, 3, 3, 4, seed=1)
    x, kernel = (
        array if axis is None else jnp.stack([array, 2 * array, jnp.cos(array)], axis)
        for array, axis in zip((x, kernel), axes, strict=True)
    )
    ours, reference = (jax.jit(jax.vmap(value_and_gradients(conv), axes))(x, kernel) for conv in (convolution, xla))
    assert_close(ours, reference)


def test_gradient_of_a_vmapped_sum():
    """The derivative of a vmapped function, whose graph holds the loop of the batching rule."""
    x, kernel = normal(3, 2, 6, 6, 3), normal(3, 3, 3, 3, 4, seed=1)
    ours, reference = (
        jax.jit(jax.grad(lambda k, conv=conv: jnp.sum(jnp.sin(jax.vmap(conv)(x, k)))))(kernel)
        for conv in (convolution, xla)
    )
    assert_close(ours, reference)


def client_mesh():
    return jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


@needs_two
def test_own_weights_on_a_mesh():
    x, kernel = normal(4, 2, 6, 6, 3), normal(4, 3, 3, 3, 4, seed=1)

    def loop(x, kernel):
        return lax.map(lambda row: value_and_gradients(convolution)(*row), (x, kernel))

    mapped = jax.shard_map(loop, mesh=client_mesh(), in_specs=P("clients"), out_specs=P("clients"))
    assert_close(jax.jit(mapped)(x, kernel), jax.vmap(value_and_gradients(xla))(x, kernel))


@needs_two
def test_a_shared_model_on_a_mesh():
    """The gradient of a kernel that every device has must be summed over the devices."""
    x, kernel = normal(4, 2, 6, 6, 3), normal(3, 3, 3, 4, seed=1)

    def inside(kernel, x):
        return jax.grad(lambda k: jnp.sum(jnp.sin(jax.vmap(convolution, (0, None))(x, k))))(kernel)

    mapped = jax.shard_map(inside, mesh=client_mesh(), in_specs=(P(), P("clients")), out_specs=P())
    expected = jax.grad(lambda k: jnp.sum(jnp.sin(jax.vmap(xla, (0, None))(x, k))))(kernel)
    assert_close(jax.jit(mapped)(kernel, x), expected)


# ---- Speed, as far as the compiled program shows it.


def convolutions(compiled):
    return [line for line in compiled.as_text().splitlines() if " convolution(" in line]


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the layout matters on CPU")
@pytest.mark.optimized
def test_gradients_keep_to_the_fast_layout(clients):
    """Any other layout runs some fifty times slower in a loop over clients."""
    kernels = (normal(4, 3, 3, 2, 20), normal(4, 3, 3, 20, 24, seed=1))
    directions = jax.tree.map(jnp.cos, kernels)
    x = clients[2]
    for mode in MODES:
        ours = hessian_times_vector(convolution, mode)
        run = jax.jit(lambda *c, ours=ours: lax.map(lambda row: ours(*row), c))
        found = convolutions(run.lower(kernels, directions, x).compile())
        assert found
        assert all("b01f_01io->b01f" in line for line in found)


@pytest.mark.slow
@pytest.mark.optimized
def test_own_weights_are_never_grouped():
    x, kernel = normal(5, 2, 6, 6, 3), normal(5, 3, 3, 3, 20, seed=1)
    run = jax.jit(jax.vmap(value_and_gradients(convolution)))
    assert all("feature_group_count" not in line for line in convolutions(run.lower(x, kernel).compile()))


# ---- Mistakes.


@pytest.mark.parametrize(
    ("x", "kernel", "options", "complaint"),
    [
        ((4, 4, 1), (3, 3, 1, 2), {}, "takes x"),
        ((1, 4, 4, 3), (3, 3, 1, 2), {}, "channels"),
        ((1, 4, 4, 4), (3, 3, 2, 3), {"feature_group_count": 2}, "multiple of the groups"),
        ((1, 4, 4, 1), (3, 3, 1, 2), {"padding": "WIDE"}, "padding"),
        ((1, 4, 4, 1), (3, 3, 1, 2), {"padding": ((1, 1),)}, "padding"),
        ((1, 4, 4, 1), (3, 3, 1, 2), {"strides": 0}, "strides"),
        ((1, 4, 4, 1), (3, 3, 1, 2), {"kernel_dilation": (1, 2, 3)}, "kernel_dilation"),
        ((1, 4, 4, 1), (5, 5, 1, 2), {"padding": "VALID"}, "does not fit"),
    ],
)
def test_mistakes_raise(x, kernel, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        convolution(jnp.ones(x), jnp.ones(kernel), **options)


def test_eager_primitive():
    """Called outside jit, for instance when a user steps through with `jax.disable_jit`."""
    x, kernel = normal(1, 4, 4, 2), normal(3, 3, 2, 3, seed=1)
    with jax.disable_jit():
        out = convolve(x, kernel, Window())
    assert_close(out, xla(x, kernel, padding="VALID"))
