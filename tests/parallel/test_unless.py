"""A choice that each client makes: as `lax.cond` does, without copies for each client and without work in vain."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster.parallel import unless

SHARED = jnp.arange(6.0).reshape(2, 3)  # what all clients close over


def chosen(known, x, shared=SHARED):
    """A vector and a number, of which the one that is computed takes the other's place."""
    return unless(known, {"a": x, "b": x.sum()}, lambda: {"a": x @ shared.T @ shared, "b": jnp.max(shared)})


def one_by_one(known, x, shared=SHARED):
    other = {"a": x @ shared.T @ shared, "b": jnp.max(shared)}
    return {"a": jnp.where(known, x, other["a"]), "b": jnp.where(known, x.sum(), other["b"])}


@pytest.mark.parametrize("known", [[True, False, True], [True] * 3, [False] * 3])
def test_each_client_has_its_own(known):
    known, x = jnp.asarray(known), jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
    expected = jax.vmap(one_by_one)(known, x)
    chex.assert_trees_all_close(jax.vmap(chosen)(known, x), expected, rtol=1e-6)
    alone = [jax.jit(chosen)(*row) for row in zip(known, x, strict=True)]
    chex.assert_trees_all_close(jax.tree.map(lambda *rows: jnp.stack(rows), *alone), expected, rtol=1e-6)


def test_some_or_none_of_it_may_differ_by_client():
    x = jnp.asarray([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    for known in (True, False):
        alike = jax.vmap(chosen, in_axes=(None, 0))(jnp.asarray(known), x)
        chex.assert_trees_all_close(alike, jax.vmap(one_by_one, in_axes=(None, 0))(jnp.asarray(known), x), rtol=1e-6)
    varied = jnp.asarray([True, False])
    same = jax.vmap(chosen, in_axes=(0, None))(varied, x[0])
    chex.assert_trees_all_close(same, jax.vmap(one_by_one, in_axes=(0, None))(varied, x[0]), rtol=1e-6)


def test_runs_side_by_side_each_have_their_clients():
    """Two runs of three clients; the models of the runs differ."""
    rng = np.random.default_rng(0)
    known = jnp.asarray([[True, False, True], [True, True, True]])
    x = jnp.asarray(rng.normal(size=(3, 3)), jnp.float32)  # the runs share their clients' rows
    shared = jnp.asarray(rng.normal(size=(2, 2, 3)), jnp.float32)

    def both(function):
        clients = jax.vmap(function, in_axes=(0, 0, None))
        return jax.jit(jax.vmap(clients, in_axes=(0, None, 0)))(known, x, shared)

    chex.assert_trees_all_close(both(chosen), both(one_by_one), rtol=1e-6)


def test_what_all_clients_share_is_not_copied():
    """With `lax.cond` a thousand clients had 2.5 GB of copies of four models."""
    known, x = jnp.zeros(7, bool), jnp.ones((7, 3))
    shapes = re.findall(r"f32\[[\d,]*\]", str(jax.make_jaxpr(jax.vmap(chosen))(known, x)))
    assert "f32[2,3]" in shapes
    assert "f32[7,2,3]" not in shapes


def test_nothing_is_computed_where_all_is_known():
    calls = []

    def counted(x):
        jax.debug.callback(lambda value: calls.append(float(value)), x.sum(), ordered=False)
        return x + 1

    def client(known, x):
        return unless(known, x, lambda: counted(x))

    x = jnp.ones((3, 2))
    for known, expected in (([True] * 3, 0), ([True, False, True], 3)):
        jax.block_until_ready(jax.jit(jax.vmap(client))(jnp.asarray(known), x))
        jax.effects_barrier()
        assert len(calls) == expected
