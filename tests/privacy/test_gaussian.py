"""Differential privacy: what one client can move, the noise, and what a clustering sees."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjax_cluster import faults, local, nn, parallel, privacy, server, tree
from fedjax_cluster.algorithms import REGISTRY, cfl_gp, fesem
from fedjax_cluster.parallel import Contribution
from fedjax_cluster.privacy.gaussian import ALL, CHOSEN, ONE, SHOWN, Release, gaussian
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import ClientData, Cohort
from tests.federations import blobs, one_step
from tests.private_methods import NOISY, ONE_DEVICE, PLAIN, build, started

ROWS, SLOTS, SIZE = 12, 3, 200
QUICK = ("fedavg", "cfl")
SOME = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, method in REGISTRY.items()
    if vars(method).get("sends") is not None
]

# ------------------------------------------------------------------------------------------ what one client can move


def cohort_of(vectors, mask=None):
    count = len(vectors)
    data = ClientData(jnp.asarray(vectors), jnp.zeros((count, 1)), jnp.ones(count, jnp.int32))
    return Cohort(jnp.arange(count), jnp.ones(count, bool) if mask is None else mask, data)


@functools.partial(jax.jit, static_argnames=("mechanism", "sends", "mapping"))
def aggregated(mechanism, sends, mapping, key, clip, cohort, slots):
    return server.aggregate_clients(
        lambda client, slot: (client.data.x, slot),
        dataclasses.replace(cohort, mapping=mapping),
        slots,
        num_slots=SLOTS,
        contribute=lambda output: Contribution(
            jnp.arange(SLOTS) if sends == ALL else output[1],
            jnp.full(SLOTS, 9.0) if sends == ALL else jnp.asarray(9.0),
            {"delta": {"a": output[0][..., :5], "b": output[0][..., 5:]}, "stats": {}},
        ),
        collect=lambda output: output[1],
        private=Release(mechanism, sends, key, clip),
    )[0]


def means(vectors, slots, mechanism=PLAIN, sends=CHOSEN, mapping=ONE_DEVICE, clip=None, seed=0):
    """What the server makes of vectors [C, d] of clients in clusters i32[C]; of ALL [C, K, d] for every cluster."""
    clip = jnp.full((SLOTS, 1), mechanism.clip) if clip is None else jnp.asarray(clip, jnp.float32)
    placed = parallel.place_rows(mapping, (cohort_of(vectors), jnp.asarray(slots, jnp.int32)))
    sent = jax.device_get(aggregated(mechanism, sends, mapping, jax.random.key(seed), clip, *placed))
    value = np.concatenate([sent.value["delta"]["a"], sent.value["delta"]["b"]], -1)
    return value, np.asarray(sent.weight), sent.clip


def clipped(vectors, norm):
    lengths = np.linalg.norm(vectors.reshape(len(vectors), -1), axis=1)
    return vectors * np.minimum(1, norm / lengths).reshape(-1, *[1] * (vectors.ndim - 1))


@pytest.mark.parametrize(("strategy", "devices"), [("scan", 1), ("vmap", 1), ("chunked", 2)])
def test_each_client_is_clipped_by_itself_and_counts_once(strategy, devices):
    """A clip of a chunk's mean would let one client through whose neighbours send little; weights do not count, and
    a client of no cluster (−1) is in no sum, which the last cluster's would take.
    """
    rng = np.random.default_rng(0)
    vectors = (rng.normal(size=(ROWS, 8)) * 10.0 ** rng.integers(-2, 3, (ROWS, 1))).astype(np.float32)
    slots = np.array([0, 1, 0, 2, 1, 0, 0, 2, 1, -1, 1, 2])
    chunk = [2] if strategy == "chunked" else []
    mapping = parallel.client_mapping(strategy, *chunk, devices=jax.devices()[:devices])
    value, weight, _ = means(vectors, slots, mapping=mapping)
    for slot in range(SLOTS):
        expected = clipped(vectors[slots == slot], 0.5).sum(0) / (slots == slot).sum()
        np.testing.assert_allclose(value[slot], expected, rtol=1e-4, atol=1e-6)
    assert weight.tolist() == [4, 4, 3]


@pytest.mark.slow
@pytest.mark.parametrize("sends", [ONE, CHOSEN, ALL])
def test_replacing_a_client_moves_all_sums_together_by_twice_the_clip_at_most(sends):
    """Also where it goes from one cluster to another, and where it adds to all of them."""
    rng = np.random.default_rng(1)
    shape = (ROWS, SLOTS, 8) if sends == ALL else (ROWS, 8)
    vectors, slots = rng.normal(size=shape).astype(np.float32) * 3, rng.integers(0, SLOTS, ROWS)
    slots = slots * 0 if sends == ONE else slots
    farthest = 0.0
    for client in range(4):
        for new, slot in ((-vectors[client], slots[client]), (vectors[client] * 1e6, (slots[client] + 1) % SLOTS)):
            other, moved = vectors.copy(), slots.copy()
            other[client], moved[client] = new, slots[client] if sends == ONE else slot
            pairs = [means(*each, sends=sends)[:2] for each in ((vectors, slots), (other, moved))]
            sums = [mean * np.maximum(count, 1)[:, None] for mean, count in pairs]
            farthest = max(farthest, float(np.linalg.norm(sums[0] - sums[1])))
    assert farthest <= 2 * PLAIN.clip * (1 + 1e-5)
    assert farthest > 1.9 * PLAIN.clip


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_a_round_moves_the_models_by_no_more_than_the_clip(name):
    """From one state, and with one client's rows replaced by others: of every method whose sensitivity is stated."""
    method, population, state = started(name)
    x = population.data.x.at[3].multiply(-5.0)
    other = dataclasses.replace(population, data=population.data._replace(x=x))
    round_of = 1 if name == "cfl_gp" else 0
    state = state._replace(round=jnp.asarray(round_of))
    sums, before = [], state.clusters.params
    for each in (population, other):
        new, info = one_step(method, each, state, round_of)
        count = np.asarray(info.num_clients) if method.sends != ALL else np.full(2, 7)
        change = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), new.clusters.params, before)
        rows = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(change)], 1)
        lengths = np.linalg.norm(rows, axis=1)
        assert (lengths <= 0.5 * (1 + 1e-4)).all()
        assert lengths.max() > 0.01
        sums.append(rows * np.maximum(count, 1)[: len(rows), None])
    assert np.linalg.norm(sums[0] - sums[1]) <= 2 * 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_clipped_of_halves_is_no_longer_than_the_clip(dtype):
    """Rounded to its own type it would be up to .4 % longer, and the noise that much too small for ε."""
    change = {"output": {"kernel": jax.random.normal(jax.random.key(0), (40, 5)).astype(dtype)}}
    for clip in (0.1, 0.37, 1.0):
        (cut,), _ = NOISY.clipped(tuple(change.values()), jnp.full(1, clip))
        assert float(jnp.linalg.norm(cut["kernel"])) <= clip * (1 + 1e-6)


def test_layers_are_clipped_each_to_their_part():
    mechanism = dataclasses.replace(PLAIN, clipping="layers")
    change = {"one": {"kernel": jnp.full((4, 4), 3.0), "bias": jnp.zeros(4)}, "two": {"kernel": jnp.full(9, 1e-3)}}
    cut, norms = mechanism.clipped(change, mechanism.start_clip(change))
    np.testing.assert_allclose(norms, [12.0, 3e-3], rtol=1e-5)
    assert float(jnp.linalg.norm(cut["one"]["kernel"])) == pytest.approx(0.5 / math.sqrt(2), rel=1e-5)
    chex.assert_trees_all_equal(cut["two"], change["two"])


@pytest.mark.parametrize("clipping", ["flat", "layers"])
@pytest.mark.parametrize("size", [1e25, 3e38])
def test_changes_whose_squares_overflow_are_clipped_and_not_lost(clipping, size):
    mechanism = dataclasses.replace(
        PLAIN, clipping=clipping, clustering_clip=0.5, clustering_noise_multiplier=0.0, noise_multiplier=0.0
    )
    change = {"one": {"kernel": jnp.full(4, size)}, "two": {"kernel": jnp.full(4, 3.0)}}
    cut, norms = mechanism.clipped(change, mechanism.start_clip(change))
    assert (np.asarray(norms) > 0.5).all()
    # Beside a huge layer a small one is clipped as ever.
    expected = [0.25, 0.0] if clipping == "flat" else [0.25 / math.sqrt(2)] * 2
    for name, value in zip(("one", "two"), expected, strict=True):
        np.testing.assert_allclose(cut[name]["kernel"], value, rtol=1e-5, atol=1e-12)
    shown = mechanism.shown(jax.random.key(0), change)
    np.testing.assert_allclose(shown["one"]["kernel"], 0.25, rtol=1e-5)


def test_who_sends_nothing_finite_adds_nothing_and_counts():
    """Were it not counted, the others' mean would tell of it."""
    vectors = np.ones((ROWS, 8), np.float32) * 0.01
    vectors[4] = np.nan
    value, weight, _ = means(vectors, np.zeros(ROWS), sends=ONE)
    assert weight.tolist() == [ROWS, 0, 0]
    np.testing.assert_allclose(value[0], 0.01 * (ROWS - 1) / ROWS, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- the noise


@functools.partial(jax.jit, static_argnames=("mechanism", "sends", "size"))
def noised(mechanism, sends, size, keys, clip, count):
    total = {"delta": {"a": jnp.zeros((SLOTS, size)), "b": jnp.zeros((SLOTS, size))}}
    total |= {"below": jnp.zeros((SLOTS, clip.shape[1]))} if mechanism.quantile is not None else {}

    def one(key):
        delta, weight, moved = Release(mechanism, sends, key, clip).means(total, count, jnp.ones(SLOTS, bool))
        return jax.tree.map(lambda leaf: leaf * jnp.maximum(weight, 1.0)[:, None], delta), weight, moved

    return jax.vmap(one)(keys)


def many(mechanism, sends, clip, draws=300, count=(8.0, 2.0, 5.0), size=SIZE):
    """Noised sums [draws, K, size], counts [draws, K], of zeros, in rounds of their own."""
    keys = jax.random.split(jax.random.key(3), draws)
    return jax.device_get(noised(mechanism, sends, size, keys, jnp.asarray(clip, jnp.float32), jnp.asarray(count)))


@pytest.mark.parametrize("z", [0.25, 1.5])
def test_the_noise_of_a_sum_is_z_times_twice_its_clusters_clip(z):
    mechanism, clip = dataclasses.replace(NOISY, noise_multiplier=z), [[0.5], [4.0], [1.0]]
    sums, weight, _ = many(mechanism, SHOWN, clip)
    assert (weight == [8, 2, 5]).all()
    for slot, norm in enumerate((0.5, 4.0, 1.0)):
        noise = sums["a"][:, slot] / (2 * z * norm)
        assert noise.std() == pytest.approx(1, abs=0.03)
        assert scipy.stats.kstest(noise.ravel()[:20000], "norm").pvalue > 1e-4


def test_noise_is_drawn_anew_for_every_round_cluster_and_layer():
    sums, _, _ = many(NOISY, SHOWN, [[1.0]] * SLOTS)
    streams = np.stack([sums["a"][0], sums["a"][1], sums["b"][0]]).reshape(-1, SIZE)
    close = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(close).max() < 5 / math.sqrt(SIZE)


@pytest.mark.slow
def test_counts_are_noised_only_where_clients_choose():
    for sends, expected in ((SHOWN, 0.0), (CHOSEN, 2 * 1.5)):
        weight = many(NOISY, sends, [[1.0]] * SLOTS, draws=3000, count=(90.0, 50.0, 70.0), size=1)[1]
        np.testing.assert_allclose(weight.std(0), expected, rtol=0.06, atol=1e-6)
        np.testing.assert_allclose(weight.mean(0), [90, 50, 70], atol=0.3)


def test_a_cluster_that_seems_empty_takes_no_step():
    sums, weight, _ = many(NOISY, CHOSEN, [[1.0]] * SLOTS, count=(0.0, 0.0, 40.0))
    empty = weight[:, 0] == 0
    assert 0.5 < empty.mean() < 0.75  # N(0, 3) below 1
    assert (weight[:, 0][~empty] >= 1).all()
    assert (weight[:, 2] > 0).all()
    assert np.isfinite(sums["a"]).all()


def test_the_parts_of_a_round_together_have_the_multiplier_that_is_counted():
    """Σ (sensitivity/deviation)² over what a round releases is 1/z², in the worst case of both neighbours."""
    mechanism = dataclasses.replace(NOISY, quantile=0.5, clipping="layers")
    layers, norm, z = 2, 1.0, 1.5
    clip = [[norm / math.sqrt(2)] * layers] * SLOTS
    sums, weight, moved = many(mechanism, CHOSEN, clip, draws=3000, count=(900.0, 900.0, 900.0), size=40)
    deviation = {"sums": sums["a"].std(), "counts": weight.std()}
    below = mechanism.quantile - np.log(moved / np.asarray(clip)) / mechanism.quantile_rate
    deviation["bits"] = float(((below - 0.5) * weight[..., None]).std())
    same = (2 * norm / deviation["sums"]) ** 2 + layers / deviation["bits"] ** 2
    apart = (math.sqrt(2) * norm / deviation["sums"]) ** 2 + 2 / deviation["counts"] ** 2
    apart += layers / 2 / deviation["bits"] ** 2
    assert max(same, apart) == pytest.approx(1 / z**2, rel=0.03)


@pytest.mark.slow
def test_the_clip_follows_a_quantile_of_the_norms():
    """Andrew et al. 2021, Algorithm 1: with little noise it ends where a third of the norms are below it."""
    mechanism = privacy.gaussian(clip=50.0, noise_multiplier=1e-4, delta=1e-5, quantile=1 / 3)
    vectors = np.zeros((ROWS, 8), np.float32)
    vectors[:, 6] = np.arange(1, ROWS + 1)
    clip = [[50.0]] * SLOTS
    for seed in range(60):
        clip = means(vectors, np.zeros(ROWS), mechanism, clip=clip, seed=seed)[2]
    assert 3.9 <= clip[0][0] <= 5.1
    np.testing.assert_allclose(clip[1:], 50, rtol=0.02)  # of clusters that nobody is in, by the noise alone


@pytest.mark.parametrize(
    ("sends", "clients", "quantile", "least", "most"),
    [
        (ONE, 20, 0.1, 0.15, 0.32),
        (ONE, 20, 0.9, 0.45, 0.75),
        (ONE, 5, 0.9, 0.2, 4.0),
        (CHOSEN, 20, 0.1, 0.1, 0.4),
        (CHOSEN, 20, 0.9, 0.4, 1.0),
        (CHOSEN, 5, 0.1, 0.02, 0.6),
        (CHOSEN, 5, 0.9, 0.2, 4.0),
    ],
)
def test_the_clip_stays_about_its_quantile_under_much_noise(sends, clients, quantile, least, most):
    """Norms from .2 to .6. With the noised share cut to [0, 1] it was 300 after 400 rounds, or 1e-4."""
    mechanism = privacy.gaussian(clip=1.0, noise_multiplier=2.0, delta=1e-5, quantile=quantile)
    norms, count, active = jnp.linspace(0.2, 0.6, clients), jnp.array([float(clients)]), jnp.array([True])

    def a_round(clip, key):
        total = {"delta": {}, "below": jnp.where(norms[:, None] <= clip, 0.5, -0.5).sum(0)[None]}
        return Release(mechanism, sends, key, clip).means(total, count, active)[2], clip

    keys = jax.vmap(lambda key: jax.random.split(key, 1000))(jax.random.split(jax.random.key(0), 8))
    clips = jax.jit(jax.vmap(lambda keys: jax.lax.scan(a_round, jnp.full((1, 1), 0.4), keys)[1]))(keys)
    assert least <= float(jnp.median(clips[:, 500:])) <= most


@pytest.mark.slow
def test_a_method_keeps_the_clip_beside_its_optimisers_state():
    mechanism = dataclasses.replace(NOISY, quantile=0.5, clipping="layers")
    method, population, state = started("fedavg", mechanism)
    assert state.clusters.optimizer.clip.shape == (1, 2)
    new, _ = one_step(method, population, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
    assert not np.array_equal(new.clusters.optimizer.clip, state.clusters.optimizer.clip)


# --------------------------------------------------------------------------------------- what a clustering sees


@pytest.mark.slow
def test_what_a_client_shows_is_clipped_and_noised_by_itself():
    mechanism = privacy.gaussian(
        clip=1, noise_multiplier=1, delta=1e-5, clustering_clip=3.0, clustering_noise_multiplier=0.5
    )
    message = [jnp.full(SIZE, 0.5), jnp.full(SIZE, -7.0)]
    shown = jax.vmap(lambda key: mechanism.shown(key, message))(jax.random.split(jax.random.key(0), 500))
    first, second = (np.asarray(part) for part in shown)
    cut = 3.0 / math.sqrt(SIZE * (0.25 + 49))
    for part, expected in ((first, 0.5 * cut), (second, -7.0 * cut)):
        assert part.mean() == pytest.approx(expected, abs=0.02)
        assert part.std() == pytest.approx(2 * 3.0 * 0.5, rel=0.02)
    assert abs(np.corrcoef(first[0], first[1])[0, 1]) < 0.25
    assert abs(np.corrcoef(first[0], second[0])[0, 1]) < 0.25
    spoilt = mechanism.shown(jax.random.key(1), [jnp.full(SIZE, jnp.nan), message[1]])
    assert np.isfinite(np.asarray(spoilt)).all()
    assert abs(float(jnp.mean(spoilt[1]))) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cfl", "pacfl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cfl_gp", "fedgwc"))]
)
def test_a_server_clusters_by_what_is_shown_alone(name):
    """With noise that drowns everything, what it keeps of the clients has the noise's size, and nobody's data."""
    loud = dataclasses.replace(PLAIN, clustering_clip=1.0, clustering_noise_multiplier=1e4)
    method, population, state = started(name, loud)
    number = 1 if name == "cfl_gp" else 0
    if name != "pacfl":
        state, _ = one_step(method, population, state._replace(round=jnp.asarray(number)), number)
    if name == "fedgwc":
        x = population.data.x.at[3].multiply(-50.0)
        other = dataclasses.replace(population, data=population.data._replace(x=x))
        moved, _ = one_step(method, other, started(name, loud)[2])
        np.testing.assert_allclose(moved.server.interactions, state.server.interactions, atol=0.01)
        return
    kept = {"cfl": "update", "cfl_gp": "profile", "pacfl": "vectors"}[name]
    rows = np.asarray(getattr(state.clients, kept))
    rows = rows[:, 0] if name == "cfl_gp" else rows
    assert rows.std() == pytest.approx(2e4, rel=0.25)
    assert abs(np.corrcoef(rows.reshape(7, -1)[:2])[0, 1]) < 0.5


@pytest.mark.parametrize(("every", "until"), [(1, None), (2, None), (3, 8)])
def test_cfl_gp_counts_the_rounds_in_which_it_clusters(every, until):
    method = build("cfl_gp", every=every, cluster_until=until)
    assert isinstance(method, cfl_gp)
    _, _, state = started("cfl_gp", every=every, cluster_until=until)
    rounds = [bool(method.clustering_round(state._replace(round=jnp.asarray(number)))) for number in range(12)]
    assert [method.times_shown(done) for done in range(13)] == [sum(rounds[:done]) for done in range(13)]


@pytest.mark.slow
def test_personal_layers_that_nobody_sends_get_no_noise():
    method, population, state = started("fedper", NOISY)
    new, _ = one_step(method, population, state)
    chex.assert_trees_all_equal(new.clusters.params["output"], state.clusters.params["output"])
    moved = jax.tree.map(jnp.subtract, new.clusters.params, state.clusters.params)
    assert float(jnp.abs(tree.ravel(moved)).max()) > 0.01


def test_a_silent_client_of_fesem_counts_in_the_cluster_that_it_was_in(monkeypatch):
    counts, means_of = [], Release.means

    def noted(self, total, count, active):
        jax.debug.callback(lambda count: counts.append(np.asarray(count)), count, ordered=True)
        return means_of(self, total, count, active)

    monkeypatch.setattr(Release, "means", noted)
    quiet = gaussian(clip=10.0, noise_multiplier=0.0, delta=1e-3)
    method = fesem(nn.linear(), clusters=3, start="random", privacy=quiet, local=local.sgd(1e-6, batch_size=4, steps=1))
    run = simulate(
        method, blobs(clients=12, groups=3), rounds=2, fault=faults.nan_updates(share=1.0), mapping=ONE_DEVICE
    )
    expected = np.bincount(run.labels, minlength=3)
    assert sorted(expected)[-1] < 12
    jax.effects_barrier()
    for count in counts:
        np.testing.assert_array_equal(count, expected)
    assert counts
