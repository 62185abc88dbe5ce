"""Texts of topics: their transitions are those of the formula."""

import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster.data import check_federation, digits, from_arrays, partition, scenarios, write_population
from fedjax_cluster.data.scenarios import texts


def _transitions(x, y, words):
    counts = np.zeros((words, words))
    np.add.at(counts, (x.ravel(), y.ravel()), 1)
    return counts / np.maximum(counts.sum(1, keepdims=True), 1), counts.sum(1)


def test_words_follow_one_another_as_the_formula_says():
    """p(v | u) = common · q₀ + (1 − common) · q_topic, with weights like 1, 1/2, 1/3, estimated from long texts."""
    arguments = {"clients": 2, "num_groups": 2, "vocabulary": 12, "followers": 3, "common": 0.4, "seed": 5}
    federation = scenarios.topics(**arguments, length=400, examples_per_client=200)
    language = partition.generators(5, 3)[0]
    tables = [texts._successors(language, 12, 3) for _ in range(3)]
    weights = np.array([1, 1 / 2, 1 / 3]) / (11 / 6)
    for topic in range(2):
        expected = np.zeros((12, 12))
        for table, share in ((tables[0], 0.4), (tables[1 + topic], 0.6)):
            for word in range(12):
                expected[word, table[word]] += share * weights
        found, times = _transitions(federation.train.x[topic], federation.train.y[topic], 12)
        often = times > 2000
        assert often.sum() >= 5
        np.testing.assert_allclose(found[often], expected[often], atol=0.04)


def test_targets_are_the_next_words():
    train = scenarios.topics(clients=4, length=6, vocabulary=30).train
    np.testing.assert_array_equal(train.x[..., 1:], train.y[..., :-1])
    assert train.x.dtype == train.y.dtype == np.int32
    assert train.x.min() >= 0
    assert train.x.max() < 30


def test_followers_are_different_and_some_words_frequent():
    successors = texts._successors(np.random.default_rng(0), 60, 8)
    assert all(len(set(of_word)) == 8 for of_word in successors.tolist())
    counts = np.sort(np.bincount(successors[:, 0], minlength=60))[::-1]
    assert counts[:3].sum() > 0.25 * 60  # of uniform draws 5 % would be


def test_with_everything_common_the_topics_are_the_same():
    one = scenarios.topics(clients=2, num_groups=2, vocabulary=8, length=300, followers=2, common=1.0)
    (first, times), (second, again) = (_transitions(one.train.x[i], one.train.y[i], 8) for i in range(2))
    often = np.minimum(times, again) > 500
    assert often.sum() >= 3
    np.testing.assert_allclose(first[often], second[often], atol=0.06)
    apart = scenarios.topics(clients=2, num_groups=2, vocabulary=8, length=300, followers=2, common=0.0)
    first, second = (_transitions(apart.train.x[client], apart.train.y[client], 8)[0] for client in range(2))
    assert np.abs(first - second).max() > 0.4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"followers": 9, "vocabulary": 8}, "followers=9 is not between 1 and the 8 words"),
        ({"clients": 3}, "3 clients are too few for 4 topics"),
        ({"common": 1.5}, "common is 1.5"),
        ({"length": 0}, "length is 0"),
        ({"examples": digits()}, "draws its examples"),
    ],
)
def test_topics_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.topics(**arguments)


@pytest.mark.slow
def test_gradients_tell_the_topics_and_the_perplexity_falls():
    federation = scenarios.topics(clients=8, vocabulary=12, followers=2, length=10, common=0.2, examples_per_client=60)
    local = fc.local.sgd(4.0, batch_size=21, epochs=1)
    method = fc.algorithms.cfl_gp(fc.nn.lstm((8,), embedding=4), clusters=4, local=local, every=1)
    result = fc.simulate(method, federation, rounds=15, progress=False, eval_every=5)
    assert result.summary["adjusted_rand_index"] == 1
    assert 12 > result.history["perplexity"][4] > 1.1 * result.summary["perplexity"] > 2


def test_tokens_of_bytes_are_tokens(tmp_path):
    """Models take bytes for pixels, and would divide them by 255."""
    tokens = (np.arange(24)[:, None] + np.arange(6)) % 9
    given = tokens[:, :-1].astype(np.uint8), tokens[:, 1:].astype(np.uint8)
    federation = from_arrays(*given, client_ids=np.arange(24) % 3, num_classes=9, task="language")
    assert federation.train.x.dtype == federation.train.y.dtype == np.int32
    info = federation.info
    clients = [(given[0][rows], given[1][rows]) for rows in np.arange(24).reshape(3, 8)]
    stored = write_population(tmp_path / "p", clients, info=info)
    assert stored.train.x.dtype == np.int32
    bytes_again = federation._replace(train=federation.train._replace(x=federation.train.x.astype(np.uint8)))
    with pytest.raises(ValueError, match="x of 'train' holds tokens as bytes, which models divide by 255: give"):
        check_federation(bytes_again)
