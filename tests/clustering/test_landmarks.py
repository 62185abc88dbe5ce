"""Clusterings by landmark clients against NumPy, against the exact ones, and their error with fewer landmarks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cluster.clustering as fcc
from tests.reference import landmarks as reference
from tests.reference import subspaces

M = 24
CHOSEN = np.array([1, 4, 5, 11, 17, 20])
GROUP = np.arange(M) % 3


def interactions(clients=M, noise=0.1, groups=3, seed=0):
    """P of groups whose clients are rewarded more in the company of their own."""
    rng = np.random.default_rng(seed)
    group = np.arange(clients) % groups
    mean = np.where(group[:, None] == group[None], 0.8, 0.4)
    return (mean + noise * rng.standard_normal((clients, clients))).astype(np.float32), group


def sent(clients=9, seed=0):
    """What FLAG's clients send: bases of each class, class sizes, changes; a class that some lack."""
    rng = np.random.default_rng(seed)
    vectors = np.zeros((clients, 3, 5, 2), np.float32)
    counts = rng.integers(3, 40, (clients, 3)).astype(np.int32)
    counts[2, 1] = counts[5, 0] = 0
    for i, c in np.ndindex(clients, 3):
        if counts[i, c]:
            vectors[i, c, :, : 1 + (i + c) % 2] = np.linalg.qr(rng.normal(size=(5, 1 + (i + c) % 2)))[0]
    return vectors, counts, rng.normal(size=(clients, 7)).astype(np.float32)


def as_measured(vectors, counts, updates):
    kept = [[own[:, np.abs(own).max(0) > 0] for own in client] for client in vectors]
    return [(own, count, [change]) for own, count, change in zip(kept, counts, updates, strict=True)]


def test_landmarks_are_drawn_uniformly_and_more_of_them_hold_the_fewer():
    mask = np.arange(12) != 3
    keys = jax.random.split(jax.random.key(0), 2000)
    drawn = np.asarray(jax.vmap(lambda key: fcc.draw_landmarks(key, 4, mask))(keys))
    assert (np.diff(drawn, axis=1) > 0).all()
    share = np.bincount(drawn.ravel(), minlength=12) / 2000
    assert share[3] == 0
    np.testing.assert_allclose(share[mask], 4 / 11, atol=0.05)
    for key in keys[:5]:
        few, more = (fcc.draw_landmarks(key, number, mask).tolist() for number in (3, 6))
        assert set(few) < set(more)
        # Rows of nobody after the last client, which the number of devices decides, change no draw.
        assert fcc.draw_landmarks(key, 3, np.append(mask, [False] * 4)).tolist() == few
    assert fcc.draw_landmarks(keys[0], 11, mask).tolist() == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
def test_clients_join_the_nearest_landmarks_and_landmarks_keep_their_own(linkage):
    rng = np.random.default_rng(0)
    distance = rng.random((M, len(CHOSEN))).astype(np.float32)
    labels = np.array([2, 0, -1, 2, 0, 3])
    found = fcc.extend_labels(distance, CHOSEN, labels, 5, linkage)
    assert found.tolist() == reference.extend_labels(distance, CHOSEN.tolist(), labels.tolist(), linkage)
    mask = rng.random(M) < 0.7
    masked = np.where(mask[:, None], distance, np.nan)
    counted = np.where(mask[CHOSEN], labels, -1).tolist()
    expected = np.where(mask, reference.extend_labels(distance, CHOSEN.tolist(), counted, linkage), -1)
    assert fcc.extend_labels(masked, CHOSEN, labels, 5, linkage, mask).tolist() == expected.tolist()
    assert (np.asarray(fcc.extend_labels(distance, CHOSEN, np.full(6, -1), 5)) == -1).all()


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
def test_a_landmark_that_does_not_count_draws_nobody(linkage):
    distance = np.array([[0, 4, 2], [3, 0, 9], [1, 4, 2], [3, 2, 9]], np.float32)
    mask = np.array([False, True, True, True])
    labels = [0, 1, -1]
    for own in (0.0, np.nan):
        distance[:, 0] = own
        found = fcc.extend_labels(distance, [0, 1, 2], labels, 2, linkage, mask)
        assert found.tolist() == [-1, 1, -1, 1]
    with pytest.raises(ValueError, match="distance holds NaN"):
        fcc.extend_labels(distance, [0, 1, 2], labels, 2, linkage)


def test_affinity_to_landmarks_is_its_definition_and_with_all_clients_the_exact_one():
    matrix, _ = interactions()
    found = fcc.landmark_affinity(matrix[:, CHOSEN], CHOSEN, 0.3)
    np.testing.assert_allclose(found, reference.affinity(matrix[:, CHOSEN], CHOSEN, 0.3), rtol=1e-4, atol=1e-6)
    whole = fcc.landmark_affinity(matrix, np.arange(M), 0.3)
    np.testing.assert_allclose(whole, fcc.interaction_affinity(matrix, 0.3), rtol=1e-4, atol=1e-6)
    mask = GROUP < 2  # without some landmarks, and some others
    part = np.flatnonzero(mask)
    inside = np.flatnonzero(mask[CHOSEN])
    found = np.array(fcc.landmark_affinity(matrix[:, CHOSEN], CHOSEN, 0.3, mask))
    own = reference.affinity(matrix[np.ix_(part, CHOSEN[inside])], np.searchsorted(part, CHOSEN[inside]), 0.3)
    np.testing.assert_allclose(found[np.ix_(part, inside)], own, rtol=1e-4, atol=1e-6)
    broken = np.where(mask[CHOSEN], matrix[:, CHOSEN], np.nan)
    np.testing.assert_array_equal(fcc.landmark_affinity(broken, CHOSEN, 0.3, mask), found)
    found[np.ix_(part, inside)] = 0
    assert (found == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("angles", ["smallest", "sum"])
def test_proximity_to_landmarks_is_its_definition_and_with_all_clients_the_exact_one(angles):
    vectors, counts, updates = sent()
    chosen = np.array([0, 2, 3, 6])
    options = {"delta": 0.4, "beta": 0.6}
    found = fcc.landmark_proximity(vectors, counts, updates, chosen, angles=angles, **options)
    expected = reference.proximity(as_measured(vectors, counts, updates), chosen, reduction=angles, **options)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    by_class = fcc.classwise_angles(vectors, counts, angles)
    data = fcc.data_dissimilarity(by_class, counts, 0.4)
    exact = fcc.proximity(data, fcc.gradient_angles(updates), 0.6)
    whole = fcc.landmark_proximity(vectors, counts, updates, np.arange(9), angles=angles, **options)
    np.testing.assert_allclose(whole, exact, atol=2e-3)
    assert subspaces.gradient_angle(updates[0], updates[1]) > 0
    # Who sent infinities counts nowhere.
    mask = np.arange(9) != 2
    broken = np.where(mask[:, None], updates, np.nan)
    found = np.asarray(fcc.landmark_proximity(vectors, counts, broken, chosen, angles=angles, mask=mask, **options))
    assert np.isfinite(found).all()
    assert (found[2] == 0).all()
    assert (found[:, 1] == 0).all()


@pytest.mark.parametrize("chosen", [[0, 1], [3, 7], pytest.param([0, 4, 8], marks=pytest.mark.slow)])
def test_pairs_of_landmarks_that_are_equal_up_to_rounding_add_nothing(chosen):
    vectors, counts, updates = sent()
    # All classes' bases and all changes at equal angles: what differs is rounding.
    vectors = np.broadcast_to(vectors[:1, :1], vectors.shape).copy()
    angle = 0.7 + np.arange(9) * 2 * np.pi / 3
    vectors[:, :, :, 1:] = 0
    if len(chosen) == 3:
        basis = np.linalg.qr(np.random.default_rng(1).normal(size=(7, 7)))[0]
        updates = (np.cos(angle)[:, None] * basis[0] + np.sin(angle)[:, None] * basis[1]).astype(np.float32)
    for beta in (0.0, 0.5, 1.0):
        found = np.asarray(fcc.landmark_proximity(vectors, counts, updates, np.array(chosen), beta=beta))
        own = found[chosen]
        assert np.abs(found).max() < 1e3
        assert (own == own.T).all()
        assert (own == 0).all()


def test_values_between_landmarks_are_symmetric_and_at_most_one():
    vectors, counts, updates = sent(30, seed=3)
    own = np.asarray(fcc.landmark_proximity(vectors, counts, updates, np.arange(30), beta=0.0))
    assert own.min() == 0
    assert 1 - 1e-6 < own.max() <= 1
    np.testing.assert_array_equal(own, own.T)


def profiles(clients=60, noise=1.0, seed=0):
    rng = np.random.default_rng(seed)
    group = np.arange(clients) % 4
    means = 3 * rng.normal(size=(4, 30))
    return (means[group] + noise * rng.normal(size=(clients, 30))).astype(np.float32), group


def directions(profile, chosen, rank=4):
    embedding = fcc.subspace_embedding(jax.random.key(0), profile[chosen], rank)
    return np.asarray(fcc.landmark_directions(profile[chosen], embedding)), np.asarray(embedding.features)


def test_projections_on_the_landmarks_directions_are_those_of_their_singular_vectors():
    profile, _ = profiles()
    chosen = np.arange(3, 60, 5)
    found, features = directions(profile, chosen)
    np.testing.assert_allclose(found.T @ found, np.eye(4), atol=1e-4)
    np.testing.assert_allclose(profile[chosen] @ found, features, atol=1e-3)
    expected = reference.projections(profile, chosen, 4)
    # Up to a rotation, which is all that singular values close to each other determine.
    np.testing.assert_allclose((profile @ found) @ (profile @ found).T, expected @ expected.T, atol=1e-2)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_directions_that_are_only_rounding_are_zero(scale):
    chosen = np.arange(3, 60, 5)
    rng = np.random.default_rng(1)
    low = (scale * rng.normal(size=(60, 3)) @ rng.normal(size=(3, 30))).astype(np.float32)
    found, _ = directions(low, chosen, 6)
    np.testing.assert_allclose(found.T @ found, np.diag([1, 1, 1, 0, 0, 0]), atol=1e-4)
    assert (directions(np.zeros_like(low), chosen)[0] == 0).all()


def errors(of, numbers, seeds=range(4)):
    return [np.mean([of(number, seed) for seed in seeds]) for number in numbers]


@pytest.mark.slow
def test_errors_fall_with_the_number_of_landmarks_and_are_none_with_all():
    """Of W's entries, of clients in another group than their own, and of the singular directions."""
    clients = 96

    def of_affinity(number, seed):
        matrix, _ = interactions(clients, noise=0.35, seed=seed)
        chosen = np.asarray(fcc.draw_landmarks(jax.random.key(seed), number, np.ones(clients, bool)))
        found = np.asarray(fcc.landmark_affinity(matrix[:, chosen], chosen, 0.05))
        return np.abs(found - np.asarray(fcc.interaction_affinity(matrix, 0.05))[:, chosen]).mean()

    def of_groups(number, seed):
        matrix, group = interactions(clients, noise=0.35, seed=seed)
        chosen = np.asarray(fcc.draw_landmarks(jax.random.key(seed), number, np.ones(clients, bool)))
        found = fcc.landmark_affinity(matrix[:, chosen], chosen, 0.05)
        return (np.asarray(fcc.extend_labels(1.0 - found, chosen, group[chosen], 3)) != group).mean()

    def of_directions(number, seed):
        profile, _ = profiles(clients, noise=2.0, seed=seed)
        chosen = np.asarray(fcc.draw_landmarks(jax.random.key(seed), number, np.ones(clients, bool)))
        found, right = directions(profile, chosen)[0], np.linalg.svd(profile)[2][:4].T
        return 4 - np.square(found.T @ right).sum()

    for of in (of_affinity, of_groups, of_directions):
        found = errors(of, (6, 24, clients))
        assert found[0] > 1.5 * found[1], of.__name__
        assert found[2] == pytest.approx(0, abs=1e-4), of.__name__


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fcc.draw_landmarks(jax.random.key(0), 5, np.ones(4, bool)), "number is 5, but only 4 clients count"),
        (lambda: fcc.draw_landmarks(jax.random.key(0), 0, np.ones(4, bool)), "number is 0"),
        (lambda: fcc.extend_labels(np.ones((3, 2)), [0, 0], [0, 1], 2), "landmarks names clients twice"),
        (lambda: fcc.extend_labels(np.ones((3, 2)), [0, 7], [0, 1], 2), "landmarks names clients twice, or others"),
        (lambda: fcc.extend_labels(np.ones((3, 2)), [0, 1], [0, 2], 2), "labels holds 2, but k is 2"),
        (lambda: fcc.extend_labels(np.ones((3, 2)), [0, 1, 2], [0, 1, 1], 2), "landmarks has 3 labels for 2"),
        (lambda: fcc.extend_labels(np.ones((3, 2)), [0, 1], [0, 1], 2, "ward"), "linkage is 'ward'"),
        (lambda: fcc.landmark_affinity(np.ones((3, 2)), [0, 1], 0.0), "beta is 0.0"),
        (
            lambda: fcc.landmark_directions(np.ones((3, 5)), fcc.Embedding(jnp.ones((2, 1)), jnp.ones(1))),
            "give the embedding of these profiles",
        ),
        (
            lambda: fcc.landmark_proximity(np.ones((3, 1, 2, 1)), np.ones((3, 1), int), np.ones((4, 2)), [0]),
            "give those of the same clients",
        ),
        (
            lambda: fcc.landmark_directions(np.ones((2, 5)), fcc.Embedding(jnp.full((2, 1), np.nan), jnp.ones(1))),
            "embedding.features holds NaN",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 5.0}, "delta is 5.0"),
        ({"beta": -3.0}, "beta is -3.0"),
        ({"delta": np.nan}, "delta is nan"),
        ({"counts": np.array([[-9], [3], [50]])}, "counts holds negative numbers"),
        ({"counts": np.array([[9.5], [0.5], [2.0]])}, "give integers"),
        ({"counts": np.ones((3, 2), int)}, "give integers"),
    ],
)
def test_proximity_to_landmarks_is_as_strict_as_its_parts(changes, message):
    arguments = {"counts": np.ones((3, 1), int), **changes}
    counts = arguments.pop("counts")
    with pytest.raises(ValueError, match=message):
        fcc.landmark_proximity(np.ones((3, 1, 2, 1)), counts, np.ones((3, 2)), [0, 1], **arguments)
