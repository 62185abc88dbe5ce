"""What CFL-GP has besides Algorithm 1: compression, weight sharing, partial participation, unknown K, real images."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import data, local, nn, parallel
from fedjax_cluster.algorithms import cfl_gp, fedavg, ifca
from fedjax_cluster.algorithms import round as rounds
from fedjax_cluster.algorithms.cfl_gp.profiles import client_features, estimate_clusters
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.algorithms.starts import equal_groups
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys, run_segment
from tests.federations import blobs, play

ONE_DEVICE = parallel.client_mapping("scan", devices=jax.devices()[:1])
GRADIENT = {"local": local.sgd(1.0, batch_size=None, steps=1), "server": optax.sgd(0.3)}


def method(**options):
    return cfl_gp(nn.linear(), **{"clusters": 3, **GRADIENT, **options})


def run(rounds=7, federation=None, **options):
    return play(method(**options), blobs(clients=9, groups=3) if federation is None else federation, rounds)[0]


def labels(state):
    return labels_of(state.clients.membership).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("clients", [8, 9, 11])
def test_clients_start_in_equal_groups(clients):
    present = jnp.arange(12) < clients
    label = np.asarray(equal_groups(jax.random.key(0), present, 3))
    sizes = np.bincount(label[:clients])
    assert sizes.max() - sizes.min() <= 1
    assert (label[clients:] == -1).all()
    other = np.asarray(equal_groups(jax.random.key(1), present, 3))
    assert (label != other).any()


def test_models_start_independently_and_equal_for_all_methods():
    population = parallel.place_population(blobs().train, blobs().info, parallel.client_mapping("scan"))
    algorithms = [method(), ifca(nn.linear(), clusters=2, start="random", **GRADIENT), fedavg(nn.linear(), **GRADIENT)]
    kernels = [
        np.asarray(own.init(run_keys(0).initialization, population)[0].clusters.params["output"]["kernel"])
        for own in algorithms
    ]
    assert not np.allclose(kernels[0][0], kernels[0][1])
    np.testing.assert_array_equal(kernels[0][:2], kernels[1])
    np.testing.assert_array_equal(kernels[0][:1], kernels[2])


def first_profiles(**options):
    """Those after the first clustering round, which the clusters that it finds do not change yet."""
    return np.asarray(run(2, **options).clients.profile)


@pytest.mark.slow
def test_random_coordinates_are_those_of_the_whole_profile():
    part = run(2, compression=3.0)
    coordinates = np.asarray(part.server.coordinates)
    assert len(coordinates) == 7
    assert len(set(coordinates.tolist())) == 7
    whole = first_profiles()
    assert np.abs(whole[:, 0]).min() > 0
    np.testing.assert_allclose(part.clients.profile, whole[..., coordinates], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_profile_of_chosen_layers():
    chosen = first_profiles(profile_layers=["output/bias"])
    assert chosen.shape[-1] == 3
    np.testing.assert_allclose(chosen, first_profiles()[..., :3], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_truncation_to_no_decimals_stops_all_learning():
    """Table 7, n_d = 0: every entry of the gradient is below 1, so that nothing at all is sent."""
    federation = blobs(clients=9, groups=3)
    federation = federation._replace(
        train=federation.train._replace(x=federation.train.x / 10),
        test=federation.test._replace(x=federation.test.x / 10),
    )
    result = run(federation=federation, decimals=0)
    population = parallel.place_population(federation.train, federation.info, parallel.client_mapping("scan"))
    start = method().init(run_keys(0).initialization, population)[0]
    for before, after in zip(
        jax.tree.leaves(start.clusters.params), jax.tree.leaves(result.clusters.params), strict=True
    ):
        np.testing.assert_array_equal(before, after)
    digits = run(federation=federation, decimals=2, beta=1.0).clients.profile
    np.testing.assert_allclose(np.asarray(digits) * 100, np.round(np.asarray(digits) * 100), atol=1e-4)


@pytest.mark.slow
def test_beta_one_keeps_the_latest_update_only():
    """F.1's ablation against the cumulative mean: with one cluster both take the same path of models."""
    latest, mean = run(clusters=1, beta=1.0, rounds=4), run(clusters=1, rounds=4)
    first = run(clusters=1, rounds=2).clients.profile
    np.testing.assert_allclose(mean.clients.profile, (first + latest.clients.profile) / 2, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(latest.clients.updates, mean.clients.updates)


@pytest.mark.slow
def test_shared_layers_are_equal_in_all_clusters_and_own_layers_are_not():
    algorithm = cfl_gp(
        nn.mlp(hidden=(4,)), clusters=3, shared_layers=["!output"], profile_layers=["output"], **GRADIENT
    )
    params = play(algorithm, blobs(clients=9, groups=3), 4)[0].clusters.params
    kernel = np.asarray(params["hidden_0"]["kernel"])
    np.testing.assert_allclose(kernel[0], kernel[1], rtol=1e-5)
    np.testing.assert_allclose(kernel[0], kernel[2], rtol=1e-5)
    assert not np.allclose(params["output"]["kernel"][0], params["output"]["kernel"][1])


@pytest.mark.slow
@pytest.mark.parametrize("factory", [pytest.param(cfl_gp, marks=pytest.mark.slow), ifca])
def test_shared_layers_are_sent_once(factory):
    model, federation = nn.mlp(hidden=(4,)), blobs(clients=9, groups=3)
    sent, size = {}, {"hidden_0": 0, "output": 0}
    for shared in ((), ("!output",)):
        algorithm = factory(model, clusters=3, shared_layers=shared, **GRADIENT)
        state, reports = play(algorithm, federation, 2)
        sent[shared] = reports[1].costs.models_down
        size = {name: sum(leaf[0].size for leaf in jax.tree.leaves(state.clusters.params[name])) for name in size}
    part = size["hidden_0"] / sum(size.values())
    extra = sent[()] - 9  # beyond one model for each client
    assert extra > 0
    np.testing.assert_allclose(sent[("!output",)], 9 + (1 - part) * extra, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("factory", [cfl_gp, pytest.param(ifca, marks=pytest.mark.slow)])
def test_shared_layers_weigh_clients_as_clusters_do(factory):
    federation, model = blobs(clients=9, groups=3), nn.mlp(hidden=(4,))
    options = {"clusters": 3, "weighting": "examples", **GRADIENT}
    shared, apart = factory(model, shared_layers=["hidden_0"], **options), factory(model, **options)
    mapping = parallel.client_mapping("scan", devices=jax.devices()[:1])
    population = parallel.place_population(federation.train, federation.info, mapping)
    state, _ = shared.init(run_keys(0).initialization, population)
    cohort = parallel.gather_cohort(population, shared.select(jax.random.key(0), state))
    one, other = (jax.jit(own.step)(jax.random.key(1), state, cohort)[0] for own in (shared, apart))
    # Trained in their clusters of the start, or in those that they chose.
    label = np.asarray((state if factory is cfl_gp else other).clients.membership).argmax(1)
    examples = np.bincount(label, weights=federation.train.num_examples, minlength=3)
    assert len(set(examples / np.bincount(label, minlength=3).clip(1))) > 1
    own, kernel = (np.asarray(found.clusters.params["hidden_0"]["kernel"]) for found in (one, other))
    np.testing.assert_allclose(own[0], np.tensordot(examples / examples.sum(), kernel, 1), rtol=1e-4, atol=1e-6)


def test_a_cluster_whose_step_is_refused_weighs_nothing_in_shared_layers(monkeypatch):
    """Clients who count as left out drew the layers of all clusters back to those before the round."""
    federation, model = blobs(clients=8, groups=2), nn.mlp(hidden=(4,))
    shared, apart = (cfl_gp(model, clusters=2, shared_layers=layers, **GRADIENT) for layers in (["hidden_0"], ()))
    stepped = rounds.step_clusters

    def refusing(*given):
        clusters, _ = stepped(*given)
        kept = jax.tree.map(lambda new, old: new.at[0].set(old[0]), clusters.params, given[1].params)
        return clusters._replace(params=kept), jnp.asarray([True, False])

    monkeypatch.setattr(rounds, "step_clusters", refusing)
    mapping = parallel.client_mapping("scan", devices=jax.devices()[:1])
    population = parallel.place_population(federation.train, federation.info, mapping)
    state, _ = shared.init(run_keys(0).initialization, population)
    cohort = parallel.gather_cohort(population, shared.select(jax.random.key(0), state))
    one, other = (jax.jit(own.step)(jax.random.key(1), state, cohort)[0] for own in (shared, apart))
    own, kernel = (found.clusters.params["hidden_0"]["kernel"] for found in (one, other))
    np.testing.assert_allclose(own, np.stack([kernel[1]] * 2), rtol=1e-6)


def test_cohorts_that_are_clustered_have_a_client_for_each_cluster():
    with pytest.raises(ValueError, match="clusters is 3, but cluster_cohort clusters cohorts, of 2 clients"):
        play(method(participation=0.2, cluster_cohort=True), blobs(clients=9, groups=3), 1)


def test_a_pilot_has_no_more_models_than_a_cohort_has_clients():
    """It was refused for its default number of models, eight, which nobody had given."""
    algorithm = method(clusters="auto", participation=0.3, cluster_cohort=True, pilot_rounds=2)
    result = simulate(algorithm, blobs(clients=10, groups=2), rounds=1, progress=False)
    assert result.state.clusters.active.shape[0] <= 3


def test_one_client_is_one_cluster():
    result = simulate(cfl_gp(nn.linear(), clusters="auto", **GRADIENT), blobs(clients=1, groups=1), rounds=2)
    assert result.labels.tolist() == [0]


@pytest.mark.slow
def test_everybody_takes_part_in_clustering_rounds_unless_told_otherwise():
    federation = blobs(clients=9, groups=3)
    for options, expected in (({}, [4, 9, 4, 9, 4, 9]), ({"cluster_cohort": True}, [4] * 6)):
        reports = play(method(participation=0.4, **options), federation, 6)[1]
        assert [int(report.num_clients.sum()) for report in reports] == expected


@pytest.mark.slow
def test_only_the_cohort_changes_cluster_when_only_it_is_clustered():
    algorithm = method(participation=0.4, cluster_cohort=True, every=1)
    federation = blobs(clients=10, groups=2)
    population = parallel.place_population(
        federation.train, federation.info, parallel.client_mapping("scan", devices=jax.devices()[:1])
    )
    state, _ = algorithm.init(run_keys(0).initialization, population)
    step = jax.jit(algorithm.step)
    for number in range(4):
        selection = algorithm.select(jax.random.key(number), state)
        cohort = parallel.gather_cohort(population, selection)
        new, _ = step(jax.random.key(100 + number), state, cohort)
        outside = np.setdiff1d(np.arange(10), np.asarray(selection.index))
        np.testing.assert_array_equal(
            np.asarray(new.clients.membership)[outside], np.asarray(state.clients.membership)[outside]
        )
        filled = np.asarray(new.clients.updates - state.clients.updates)
        assert filled[outside].sum() == 0
        assert filled.sum() == int(selection.mask.sum())
        state = new


@pytest.mark.slow
def test_a_block_never_filled_does_not_count_as_zero():
    """Two groups told apart by block 0; in block 1 half of each group was never queried."""
    state = run(clusters=2, federation=blobs(clients=8, groups=2))
    rng = np.random.default_rng(0)
    group = np.arange(8) % 2
    profile = rng.normal(size=(8, 2, 21)).astype(np.float32) * 0.01
    profile[:, 0, 0] += np.where(group == 0, 1, -1)
    profile[:, 1, 1] += 20
    filled = np.arange(8) < 4
    profile[~filled, 1] = 0
    updates = np.stack([np.ones(8), filled], 1).astype(np.int32)
    grams = np.einsum("mkd,nkd->kmn", profile, profile)
    clients = state.clients._replace(
        profile=jnp.asarray(profile), updates=jnp.asarray(updates), present=jnp.ones(8, bool)
    )
    state = state._replace(clients=clients, server=state.server._replace(grams=jnp.asarray(grams)))
    features = np.asarray(client_features(state, 2)[0])
    within = np.linalg.norm(features[group == 0] - features[group == 0].mean(0), axis=1).max()
    assert within < 0.2
    assert np.linalg.norm(features[group == 0].mean(0) - features[group == 1].mean(0)) > 1.5
    imputed = np.where(updates[:, :, None] > 0, profile, profile[filled].mean(0)[None])
    imputed[:, 0] = profile[:, 0]
    _, values, _ = np.linalg.svd(imputed.reshape(8, -1))
    np.testing.assert_allclose(client_features(state, 2)[1], values[:2], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [1e-2, pytest.param(1e-4, marks=pytest.mark.slow)])
def test_groups_that_differ_little_from_what_all_share_are_found(apart):
    """At 10⁻⁴ of the largest singular value, whose square a Gram matrix in float32 rounds away."""
    clients, rng, group = 24, np.random.default_rng(0), np.arange(24) % 3
    profile = rng.normal(size=(1, 3, 21)) + apart * rng.normal(size=(3, 3, 21))[group]
    profile = (profile + 0.1 * apart * rng.normal(size=(clients, 3, 21))).astype(np.float32)
    algorithm, federation = method(), blobs(clients=clients, groups=3)
    state, _ = algorithm.init(
        run_keys(0).initialization, parallel.place_population(federation.train, federation.info, ONE_DEVICE)
    )
    state = state._replace(
        clients=state.clients._replace(profile=jnp.asarray(profile), updates=jnp.ones((clients, 3), jnp.int32)),
        server=state.server._replace(grams=jnp.asarray(np.einsum("mkd,nkd->kmn", profile, profile))),
    )
    values = np.linalg.svd(profile.reshape(clients, -1), compute_uv=False)
    assert (values[2] < 3e-4 * values[0]) == (apart == 1e-4)
    found = jax.jit(algorithm.cluster)(jax.random.key(0), state)
    assert adjusted_rand_index(found, group) == 1.0
    # In a loop of no or one turn XLA would do it every time: ten times the round's work.
    assert ":f32[24,3] = cond[" in str(jax.make_jaxpr(algorithm.cluster)(jax.random.key(0), state))


@pytest.mark.slow
def test_many_clients_are_embedded_without_a_gram_matrix(monkeypatch):
    import importlib

    module = importlib.import_module("fedjax_cluster.algorithms.cfl_gp.cfl_gp")
    small = run()
    monkeypatch.setattr(module, "LARGEST_GRAM", 4)
    large = run()
    assert large.server.grams.shape == (3, 0, 0)
    assert labels(small) == labels(large)
    np.testing.assert_allclose(client_features(small, 3)[1], client_features(large, 3)[1], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.optimized
def test_a_round_neither_copies_the_profile_nor_divides_k_means_among_devices():
    """Read off the program: either made a clustering round of 128 clients twice as long."""
    mapping = parallel.client_mapping("scan")
    federation, algorithm = blobs(clients=10), method(every=1)
    population = parallel.place_population(federation.train, federation.info, mapping)
    state, info = algorithm.init(jax.random.key(0), population)
    state = parallel.place_state(state, mapping)
    rows, blocks, width = state.clients.profile.shape
    segment = functools.partial(run_segment, algorithm=algorithm)
    stop = jnp.asarray(2, jnp.int32)
    text = jax.jit(segment).lower(run_keys(0), state, population, None, info, stop).compile().as_text()
    assert mapping.mesh is not None
    assert text is not None
    profile = f"f32[{rows // mapping.mesh.size},{blocks},{width}]"
    lines = text.splitlines()
    assert any(profile in line and "dynamic-update-slice" in line for line in lines)
    # Outside the rounds' loop the undonated state is copied once.
    copies = [line for line in lines if re.search(re.escape(profile) + r"\{[\d,]*\} copy\(", line)]
    assert len(copies) <= 1
    collective = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute)\(")
    assert not [line for line in lines if collective.search(line) and "kmeans" in line]
    # Cohorts are drawn by each device for itself; that takes no client's profile.
    assert not [line for line in lines if collective.search(line) and f"f32[{rows},{blocks},{width}]" in line]


@pytest.mark.slow
@pytest.mark.parametrize("clients", [8, 2])  # two have two singular values, and one gap
def test_unknown_number_of_clusters_is_estimated_by_a_pilot(clients):
    """Two groups are found; the pilot's models are forgotten, its transmissions counted in the first round."""
    federation = blobs(clients=clients)
    own = local.sgd(1.0, batch_size=10, steps=1)
    most = min(clients, 4)
    algorithm = cfl_gp(
        nn.linear(), clusters="auto", max_clusters=most, pilot_rounds=8, local=own, server=optax.sgd(0.1)
    )
    result = simulate(algorithm, federation, rounds=4)
    assert result.state.clusters.active.shape == (2,)
    assert result.summary["adjusted_rand_index"] == 1.0
    assert result.history["models_down"][0] >= clients * 9


# ------------------------------------------------------------------------------------------ real images

ANGLES = (0, 15, 90, 105, 180, 195, 270, 285)


def mnist(clients, seed=0, examples_per_client=None, angles=ANGLES, groups="pairs"):
    try:
        examples = data.tfds("mnist")
    except data.DatasetNotFoundError:
        pytest.skip("MNIST is not there; set TFDS_DATA_DIR to run this on real images")
    return data.scenarios.rotated(
        examples, clients=clients, angles=angles, groups=groups, seed=seed, examples_per_client=examples_per_client
    )


PAPER = {"local": local.sgd(1.0, batch_size=64, steps=1), "server": optax.sgd(0.1)}


@pytest.mark.slow
@pytest.mark.parametrize("clients", [16, 64])
def test_rotated_mnist_is_clustered_in_the_first_clustering_round(clients):
    """Sec. 5.2: eight angles, K = 4, b = 64, all images; ARI 1.0 at t = 1 and from then on."""
    result = simulate(cfl_gp(nn.mlp(), clusters=4, **PAPER), mnist(clients), rounds=6)
    assert result.history["adjusted_rand_index"][1:].tolist() == [1.0] * 5


@pytest.mark.slow
def test_rotated_mnist_reaches_table_10():
    """C = 16: 87.2 % (CFL-GP) and 58.3 % (one model) after 200 rounds; one seed, so within a point."""
    federation = mnist(16)
    ours = simulate(cfl_gp(nn.mlp(), clusters=4, stop_after=20, **PAPER), federation, rounds=200, eval_every=100)
    assert ours.summary["accuracy"] == pytest.approx(0.872, abs=0.01)
    assert ours.summary["adjusted_rand_index"] == 1.0
    one = simulate(fedavg(nn.mlp(), weighting="uniform", **PAPER), federation, rounds=200, eval_every=100)
    assert one.summary["accuracy"] == pytest.approx(0.583, abs=0.02)


@pytest.mark.slow
def test_the_number_of_clusters_on_rotated_mnist():
    """App. G: the largest gap of the singular values gives 4, the next 8."""
    result = simulate(cfl_gp(nn.mlp(), clusters=4, every=1, **PAPER), mnist(64), rounds=20)
    found = estimate_clusters(jax.random.key(0), result.state, 10)
    assert found.num_clusters == 4
    assert found.candidates == (4, 8)


@pytest.mark.slow
def test_compression_by_a_thousand_keeps_the_clusters():
    """Fig. 4: 80 clients, four angles."""
    federation = mnist(80, examples_per_client=500, angles=(0, 90, 180, 270), groups="angles")
    own = local.sgd(1.0, batch_size=100, steps=1)
    algorithm = cfl_gp(nn.mlp(), clusters=4, compression=1000.0, every=1, local=own, server=optax.sgd(0.1))
    assert simulate(algorithm, federation, rounds=11).summary["adjusted_rand_index"] == 1.0


@pytest.mark.slow
def test_a_pilot_clusters_until_its_end():
    """With `cluster_until=0` it counted the clusters of profiles that nobody had filled."""
    own = local.sgd(1.0, batch_size=None, steps=1)
    method = functools.partial(cfl_gp, nn.linear(), clusters="auto", max_clusters=4, pilot_rounds=8, local=own)
    federation = blobs(clients=12, groups=3)
    found = [simulate(method(cluster_until=until), federation, rounds=1, progress=False) for until in (None, 0)]
    assert len({len(each.state.clusters.active) for each in found}) == 1
    # Round 0 is none of clustering, so that these are the pilot's.
    assert [each.history["clusterings"][0] for each in found] == [4.0, 4.0]
