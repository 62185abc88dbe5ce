"""Bytes are pixels, and nothing else is; ids stay what they are."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import fedavg
from fedjax_cluster.data import from_arrays, from_partitioner, in_memory, write_population
from fedjax_cluster.data.own_examples import numbers
from fedjax_cluster.data.validation import check_federation, pixels_of
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import DatasetInfo
from tests.federations import blobs

RNG = np.random.default_rng(0)
IDS = np.arange(40) % 4


def test_values_to_predict_that_are_bytes_are_not_divided_by_255(tmp_path):
    x, age = RNG.normal(size=(40, 3)).astype(np.float32), RNG.integers(0, 120, 40)
    bytes_, whole = (from_arrays(x, age.astype(dtype), IDS, task="regression") for dtype in (np.uint8, np.int32))
    np.testing.assert_array_equal(bytes_.train.y, whole.train.y)
    assert bytes_.train.y.dtype == np.float32
    info = DatasetInfo("ages", (3,), 0, "regression")
    written = write_population(tmp_path / "p", [(x, age.astype(np.uint8))], info=info)
    assert written.train.y.dtype == np.float32
    with pytest.MonkeyPatch.context() as before:
        before.setattr("fedjax_cluster.data.encoded_clients.no_pixels", lambda y, task: y)
        old = write_population(tmp_path / "old", [(x, age.astype(np.uint8))], info=info)
    with pytest.raises(ValueError, match="write the population anew"):
        check_federation(old)
    with pytest.raises(ValueError, match="y of 'train' holds bytes, which are divided by 255"):
        check_federation(whole._replace(train=whole.train._replace(y=whole.train.y.astype(np.uint8))))


def test_parts_are_all_of_bytes_or_none_is():
    images = from_arrays(RNG.integers(0, 256, (40, 5, 5, 1)).astype(np.uint8), IDS, IDS, num_classes=4)
    other = images._replace(test=images.test._replace(x=images.test.x / np.float32(255)))
    with pytest.raises(ValueError, match="x of 'train' is uint8, but x of 'test' is float32"):
        check_federation(other)


def test_pixels_are_predicted_as_the_bytes_that_they_are():
    images = from_arrays(RNG.integers(0, 256, (40, 5, 5, 1)).astype(np.uint8), IDS, IDS, num_classes=4)
    result = simulate(
        fedavg(nn.linear(), local=local.sgd(0.5, batch_size=8, steps=2)), images, rounds=2, progress=False
    )
    x = images.test.x[0]
    for same in (x.astype(int), x.astype(np.float64), x / np.float32(255)):
        np.testing.assert_allclose(result.predict(same, 0), result.predict(x, 0), atol=1e-6)
    half = (x / np.float32(255)).astype(jnp.bfloat16)  # was all zeros
    np.testing.assert_allclose(result.predict(half, 0), result.predict(half.astype(np.float32), 0), atol=1e-6)
    for wrong in (x.astype(int) - 300, x + 0.5, x + 256.0):
        with pytest.raises(ValueError, match="but the clients' rows are bytes"):
            result.predict(wrong, 0)
    assert pixels_of(np.zeros((2, 3))).dtype == np.float64


@pytest.mark.parametrize("ids", ["01_02 01_10 02_01", "001 002 010", "1e3 2e5 3e1", "inf 1 2", "1.50 2.25 3.00"])
def test_ids_stay_what_they_are(ids):
    texts = np.asarray(ids.split())
    found = numbers(texts, names=True)
    if "." in ids:
        assert found.tolist() == [1.5, 2.25, 3.0]
    else:
        np.testing.assert_array_equal(found, texts)


def test_ids_that_are_numbers_are():
    assert numbers(np.asarray([" 1", "2 ", "-30"]), names=True).tolist() == [1, 2, -30]
    assert numbers(np.asarray(["1_0", "0_1"])).tolist() == ["1_0", "0_1"]  # of labels too
    assert numbers(np.asarray(["1e2", "2e1"])).tolist() == [100, 20]


def test_tokens_beyond_the_vocabulary_are_not_written(tmp_path):
    x = RNG.integers(0, 10, (6, 5))
    info = DatasetInfo("text", (5,), 10, "language")
    for wrong in ((x + 99, x), (x, x - 3), (x, x, x + 1, x)):
        with pytest.raises(ValueError, match="but tokens are integers from 0 on, below the 10 classes"):
            write_population(tmp_path / "p", [wrong], info=info)
    fine = write_population(tmp_path / "q", [(x, x), (x, x)], info=info)
    check_federation(in_memory(fine))
    assert from_arrays(x, x[:, ::-1], task="language").info.num_classes == x.max() + 1


def test_partitions_are_brought_to_one_form(monkeypatch):
    grey, coloured = (RNG.integers(0, 256, (4, 5, 5, channels)).astype(np.uint8) for channels in (1, 3))

    class Partitioner:
        num_partitions = 2

        def load_partition(self, number):
            return self.parts[number]

    def columns(part, *_):
        return part, np.arange(len(part)) % 2, ["cat", "dog"], None, None

    monkeypatch.setattr("fedjax_cluster.data.hugging_face._columns", columns)
    Partitioner.parts = [grey, coloured]
    federation = from_partitioner(Partitioner())
    assert federation.info.class_names == ("cat", "dog")
    x = federation.train.x
    assert x.shape[2:] == (5, 5, 3)
    assert (x[0, 0, ..., 0] == x[0, 0, ..., 2]).all()
    Partitioner.parts = [grey, coloured[:, :4]]
    with pytest.raises(ValueError, match=r"the rows of client 1 have the shape \[4, 5, 3\], but those of client 0"):
        from_partitioner(Partitioner())


def test_newcomers_of_another_kind_are_refused_also_by_their_test_rows():
    run = simulate(fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1)), blobs(), rounds=1, progress=False)
    new = blobs(clients=3)
    with pytest.raises(ValueError, match="the newcomers' test x is float64, but the federation's is float32"):
        run.admit(new._replace(test=new.test._replace(x=new.test.x.astype(np.float64))))
