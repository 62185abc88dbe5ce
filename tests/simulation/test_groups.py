"""True groups as programs have them: few of many clients without a sort."""

import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster.clustering.scores import agreement
from fedjax_cluster.simulation import history


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        ([0, 1, -1], "int32"),
        ([0, 63] * 9, "int8"),
        ([-1, 2] * 9, "int8"),
        ([0, 64] * 9, "int32"),
        ([-2, 1] * 9, "int32"),
    ],
)
def test_few_groups_of_many_clients_are_told_by_their_type(monkeypatch, groups, kind):
    monkeypatch.setattr(history, "MANY", 4)
    assert history.dtype_of_groups(np.array(groups)) == kind
    assert history.dtype_of_groups(None) is None


def test_agreement_with_few_groups_is_that_of_any_number_without_a_sort(monkeypatch):
    """Compiled for a TPU, the sort took longer than all else of a round of 100 000 clients."""
    for module in (history, agreement):
        monkeypatch.setattr(module, "MANY", 4)
    state = SimpleNamespace(
        clusters=SimpleNamespace(active=jnp.ones(3, bool)),
        clients=SimpleNamespace(
            membership=jax.nn.one_hot(jnp.asarray([0, 0, 1, 1, 2, 2, -1, 0]), 3), present=jnp.arange(8) != 3
        ),
    )
    group = jnp.asarray([0, 0, 1, 0, 2, -1, 1, 2])
    texts, found = [], []
    for kind in (jnp.int32, jnp.int8):
        compared = functools.partial(history.clusters_of_all, state)
        texts.append(str(jax.make_jaxpr(compared)(group.astype(kind))))
        found.append(compared(group.astype(kind)))
    assert [" sort[" in text for text in texts] == [True, False]
    chex.assert_trees_all_close(*found, rtol=1e-6)
    assert 0 < float(found[0]["adjusted_rand_index"]) < 1
