"""OpenML's copies, with scikit-learn's download replaced: what is done with its answer, and without a network."""

import hashlib
import inspect
import io
import json
import logging
import time
import urllib.error

import numpy as np
import pytest
import sklearn.datasets

from fedjax_cluster import cli
from fedjax_cluster.data import DatasetNotFoundError, by_name, cache, downloads, load, openml

ROWS = 40


@pytest.fixture
def small(monkeypatch):
    """Data sets of 40 rows."""
    few = {known: source._replace(rows=ROWS) for known, source in downloads.OPENML.items()}
    monkeypatch.setattr(downloads, "OPENML", few)
    monkeypatch.setattr(by_name, "OPENML", few)


@pytest.fixture
def online(small, monkeypatch):
    """OpenML answers with `answer[name]`, and notes what it was asked for."""

    class Server:
        asked = ()

        def answer(self, name):
            """Pixel p of row i is (i + p) mod 251; labels are texts, as OpenML has them."""
            source = next(source for source in downloads.OPENML.values() if source.name == name)
            pixels = (np.arange(ROWS)[:, None] + np.arange(np.prod(source.shape))) % 251
            return pixels, np.array([str(row % source.num_classes) for row in range(ROWS)], object)

    server, asked_for = Server(), inspect.signature(sklearn.datasets.fetch_openml)

    def fetch(name, **options):
        asked_for.bind(name, **options)
        server.asked += ((name, options["version"]),)
        return server.answer(name)

    monkeypatch.delenv("FEDJAX_CLUSTER_OFFLINE")
    monkeypatch.setattr(downloads, "check_online", lambda name: None)
    monkeypatch.setattr(by_name, "check_online", lambda name: None)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    return server


@pytest.mark.parametrize("known", sorted(downloads.OPENML))
def test_openml_gives_what_tfds_gives(known, online):
    x, y, info = openml(known)
    shape, classes = downloads.OPENML[known].shape, downloads.OPENML[known].num_classes
    assert (x.dtype, x.shape, y.dtype) == (np.uint8, (ROWS, *shape), np.int32)
    named = downloads.OPENML[known].class_names
    assert info == (known, shape, classes, "classification", (), named)
    assert len(named) in (0, classes)
    np.testing.assert_array_equal(y, np.arange(ROWS) % classes)
    assert not x.flags.writeable
    assert not y.flags.writeable


def test_cifar10_has_its_colours_last(online):
    """OpenML's columns are all of red, then all of green, then all of blue, each row by row."""
    x, _, _ = openml("CIFAR_10")
    for row, across, channel in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (31, 30, 2)):
        assert x[7, row, across, channel] == (7 + channel * 1024 + row * 32 + across) % 251


def test_grey_images_are_read_row_by_row(online):
    assert openml("mnist").x[3, 2, 5, 0] == (3 + 2 * 28 + 5) % 251


@pytest.mark.parametrize("name", ["mnist", "mnist_784", "MNIST-784"])
def test_names_of_openml_and_of_tfds_are_one_data_set_downloaded_once(name, online, monkeypatch):
    first = openml("mnist")
    monkeypatch.setenv("FEDJAX_CLUSTER_OFFLINE", "1")
    second = openml(name)
    assert online.asked == (("mnist_784", 1),)
    assert isinstance(second.x, np.memmap)
    np.testing.assert_array_equal(first.x, second.x)
    assert first.info == second.info


def test_a_damaged_copy_is_downloaded_again(online, cache_folder):
    first = openml("mnist")
    (file,) = cache_folder.glob("*.npy")
    file.write_bytes(file.read_bytes()[:-7])
    np.testing.assert_array_equal(openml("mnist").x, first.x)
    assert len(online.asked) == 2


@pytest.mark.parametrize("change", ["rows", "columns", "bright", "class"])
def test_what_is_not_the_data_set_is_refused_and_not_kept(change, online, cache_folder):
    pixels, labels = online.answer("mnist_784")
    changed = {
        "rows": (pixels[1:], labels[1:]),
        "columns": (pixels[:, 1:], labels),
        "bright": (pixels + 10, labels),
        "class": (pixels, np.array(["10"] * ROWS)),
    }
    online.answer = lambda name: changed[change]
    with pytest.raises(ValueError, match=r"holds other than 40 images of 28 × 28 × 1 bytes in 10 classes"):
        openml("mnist")
    assert not list(cache_folder.glob("*"))


@pytest.mark.parametrize(
    "error", [urllib.error.URLError("no route"), ValueError("md5 checksum differs"), OSError("disk full")]
)
def test_a_download_that_fails_is_one_line(error, online):
    def fails(name):
        raise error

    online.answer = fails
    with pytest.raises(DatasetNotFoundError, match=r"mnist_784 of OpenML could not be downloaded \(.*\)") as raised:
        openml("mnist")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["imagenet", "mnits", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="mnist"):
        openml(name)


def test_without_a_network_it_is_said_at_once(small, monkeypatch):
    def unreachable(request, timeout):
        assert timeout <= 5
        raise urllib.error.URLError(OSError("Name or service not known"))

    with pytest.raises(DatasetNotFoundError, match="FEDJAX_CLUSTER_OFFLINE forbids"):
        openml("mnist")
    monkeypatch.delenv("FEDJAX_CLUSTER_OFFLINE")
    monkeypatch.setattr(downloads.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", None)  # is not asked
    with pytest.raises(DatasetNotFoundError, match=r"cannot be reached \(Name or service not known\)"):
        openml("mnist")


def test_a_server_that_refuses_the_question_is_reached(small, monkeypatch):
    def refuses(request, timeout):
        raise urllib.error.HTTPError(request.full_url, 405, "no HEAD", {}, None)

    monkeypatch.delenv("FEDJAX_CLUSTER_OFFLINE")
    monkeypatch.setattr(downloads.urllib.request, "urlopen", refuses)
    downloads.check_online("mnist_784")


def test_load_prefers_tfds_and_takes_openml_with_a_notice(online, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert load("digits").info.name == "digits"
    assert not caplog.records
    assert load("fashion-mnist").info.name == "fashion_mnist"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "fashion_mnist is not prepared for TFDS" in caplog.text
    assert "taking Fashion-MNIST of OpenML, downloaded once" in caplog.text
    load("fashion_mnist")
    assert caplog.messages[1].endswith("taking Fashion-MNIST of OpenML")


def test_load_takes_what_is_prepared_for_tfds(online, tmp_path, write_tfds, monkeypatch, caplog):
    write_tfds(tmp_path / "tfds", "mnist", {"train": range(5)})
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    assert load("mnist").x.shape == (5, 4, 6, 1)
    assert not online.asked
    assert not caplog.records


def test_an_empty_tfds_folder_of_the_data_set_does_not_stand_in_the_way(online, tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert load("mnist").x.shape == (ROWS, 28, 28, 1)


def test_offline_the_command_line_names_both_ways_in_one_line_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    start = time.perf_counter()
    assert cli.main(["run", "fedavg", "--dataset", "mnist"]) == 2
    assert time.perf_counter() - start < 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "mnist_784" in said
    assert "tfds build mnist --file_format=array_record" in said


def test_a_version_of_tfds_is_not_openmls(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(DatasetNotFoundError, match="OpenML has emnist/balanced"):
        load("emnist")
    assert not cache.holds("anything")


def openml_server(rows: int, columns: int, quote: str):
    """What openml.org answers, by the end of the address: a data set of `rows` images of `columns` pixels."""
    pixels = (np.arange(rows)[:, None] * 3 + np.arange(columns)) % 251
    names = [*(f"pixel{place + 1}" for place in range(columns)), "class"]
    kinds = [*["integer"] * columns, f"{{{','.join(quote + str(digit) + quote for digit in range(10))}}}"]
    lines = [
        "@RELATION mnist",
        *(f"@ATTRIBUTE {name} {kind}" for name, kind in zip(names, kinds, strict=True)),
        "@DATA",
    ]
    lines += [",".join(map(str, [*row, f"{quote}{number % 10}{quote}"])) for number, row in enumerate(pixels)]
    arff = "\n".join(lines).encode()
    features = [
        {"index": str(place), "name": name, "data_type": "nominal" if name == "class" else "numeric"}
        | {
            "number_of_missing_values": "0",
            "is_target": str(name == "class").lower(),
            "is_ignore": "false",
            "is_row_identifier": "false",
        }
        for place, name in enumerate(names)
    ]
    about = {"id": "554", "name": "mnist_784", "version": "1", "format": "ARFF", "status": "active", "file_id": "52667"}
    about |= {"url": "https://www.openml.org/data/v1/download/52667/mnist_784.arff", "description": "digits"}
    about |= {"md5_checksum": hashlib.md5(arff).hexdigest()}
    listed = {"did": 554, "name": "mnist_784", "version": 1, "status": "active", "format": "ARFF"}
    quality = {"name": "NumberOfInstances", "value": str(float(rows))}
    answers = {
        "mnist_784.arff": arff,
        "features/554": {"data_features": {"feature": features}},
        "qualities/554": {"data_qualities": {"quality": [quality]}},
        "data/554": {"data_set_description": about},
        "data_version/1": {"data": {"dataset": [listed]}},
    }
    return pixels, {end: one if isinstance(one, bytes) else json.dumps(one).encode() for end, one in answers.items()}


@pytest.mark.parametrize(("intact", "quote"), [(True, ""), (True, "'"), (False, "")])
def test_scikit_learns_own_download(intact, quote, small, tmp_path, monkeypatch):
    """All of scikit-learn's way, from its questions to its parsers and the checksum; the network alone is replaced."""
    pixels, answers = openml_server(ROWS, 784, quote)
    if not intact:
        answers["mnist_784.arff"] = answers["mnist_784.arff"][:-1] + b"7"

    class Response(io.BytesIO):
        def info(self):
            return {}

    def urlopen(request, *given, **options):
        address = request.full_url.partition("/limit/2/")[2] or request.full_url
        return Response(next(content for end, content in answers.items() if address.split("/status")[0].endswith(end)))

    monkeypatch.delenv("FEDJAX_CLUSTER_OFFLINE")
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path / "sklearn"))
    monkeypatch.setattr(downloads, "check_online", lambda name: None)
    monkeypatch.setattr("sklearn.datasets._openml.urlopen", urlopen)
    if not intact:
        with pytest.raises(DatasetNotFoundError, match="md5 checksum"):
            openml("mnist")
        return
    x, y, _ = openml("mnist")
    np.testing.assert_array_equal(x.reshape(ROWS, -1), pixels)
    np.testing.assert_array_equal(y, np.arange(ROWS) % 10)
