"""Populations on disk: what is written is read back, a write goes on after a kill, and damage is told in a line."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from fedjax_cluster.data import ClientRows, check_federation, in_memory, open_population, write_population
from fedjax_cluster.files import sealed
from fedjax_cluster.types import UserFederation
from tests.federations import blobs

SMALL = 3e-4  # megabytes: a few clients a shard


def ragged(count=11, seed=0):
    rng = np.random.default_rng(seed)
    for client in range(count):
        rows = 1 + client % 5
        x = rng.normal(size=(rows + 2, 4)).astype(np.float32)
        y = rng.integers(0, 3, rows + 2)
        yield ClientRows(x[:rows], y[:rows], x[rows:], y[rows:], client % 2)


@pytest.fixture
def folder(tmp_path):
    write_population(tmp_path / "p", ragged(), shard_megabytes=SMALL)
    return tmp_path / "p"


def test_ragged_clients_come_back_row_by_row(folder):
    population = open_population(folder)
    assert len(list(folder.glob("train-*"))) > 2, "several shards"
    order = [7, 0, 10, 7]
    for client, data in zip(order, zip(*in_memory(population, order).train, strict=True), strict=True):
        x, y, count = data
        wanted = list(ragged())[client]
        assert count == len(wanted.x)
        np.testing.assert_array_equal(x[:count], wanted.x)
        np.testing.assert_array_equal(y[:count], wanted.y)
        assert not x[count:].any()
    np.testing.assert_array_equal(population.test.x[3], list(ragged())[3].test_x)
    assert population.group is not None
    assert population.group.tolist() == [client % 2 for client in range(11)]
    assert population.info.num_classes == 3
    assert population.info.task == "classification"
    check_federation(population)


def test_a_federation_comes_back_whole(tmp_path):
    federation = blobs()
    found = in_memory(write_population(tmp_path / "p", federation))
    longest = federation.train.num_examples.max()
    np.testing.assert_array_equal(found.train.x, federation.train.x[:, :longest])
    np.testing.assert_array_equal(found.train.y, federation.train.y[:, :longest])
    np.testing.assert_array_equal(found.test.x, federation.test.x)
    np.testing.assert_array_equal(found.group, federation.group)
    assert found.info == federation.info


def test_rows_are_divided_for_testing_where_a_client_gives_none(tmp_path):
    many = [(np.arange(10.0)[:, None] + 100 * client, np.arange(10) % 2) for client in range(3)]
    population = write_population(tmp_path / "p", many, test_fraction=0.2)
    assert population.test.num_examples.tolist() == [2, 2, 2]
    both = np.concatenate([population.train.x[1], population.test.x[1]]).ravel()
    assert sorted(both) == list(range(100, 110)), "each row once"


def test_a_stopped_write_goes_on_after_the_last_whole_shard(tmp_path, folder):
    def stopped():
        yield from list(ragged())[:8]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_population(tmp_path / "q", stopped(), shard_megabytes=SMALL)
    beside = tmp_path / "q.writing"
    with pytest.raises(ValueError, match="not written to its end"):
        open_population(tmp_path / "q")
    (beside / ".train-00002.arrayrecord.abcd1234.arrayrecord").write_bytes(b"what a killed process leaves")
    kept = (beside / "train-00000.arrayrecord").stat()
    write_population(tmp_path / "q", ragged(), shard_megabytes=SMALL)
    now = (tmp_path / "q" / "train-00000.arrayrecord").stat()
    assert (now.st_ino, now.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns), "not written again"
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "q").iterdir()}
    for file in folder.iterdir():
        if file.name != "population.json":  # which has the folder's name
            assert file.read_bytes() == (tmp_path / "q" / file.name).read_bytes()
    assert not beside.exists()


@pytest.mark.parametrize("file", ["train-00000.arrayrecord", "test-00001.arrayrecord", "clients-00001.npz"])
def test_a_stopped_write_writes_shards_again_that_were_cut_off_since(tmp_path, file, folder):
    """Such as by a power cut; the manifest had told the size that there was."""

    def stopped():
        yield from list(ragged())[:8]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_population(tmp_path / "q", stopped(), shard_megabytes=SMALL)
    cut_off = tmp_path / "q.writing" / file
    cut_off.write_bytes(cut_off.read_bytes()[:-9])
    write_population(tmp_path / "q", ragged(), shard_megabytes=SMALL)
    for shard in folder.glob("*.arrayrecord"):
        assert shard.read_bytes() == (tmp_path / "q" / shard.name).read_bytes()


@pytest.mark.parametrize("megabytes", [SMALL, 1.0])
def test_whole_shards_behind_one_that_was_cut_off_are_written_again_too(tmp_path, megabytes):
    """Those of a write with larger shards, or of fewer clients, were followed by the old ones."""

    def stopped():
        yield from list(ragged())[:9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_population(tmp_path / "q", stopped(), shard_megabytes=SMALL)
    cut_off = tmp_path / "q.writing" / "train-00000.arrayrecord"
    cut_off.write_bytes(cut_off.read_bytes()[:-9])
    few = list(ragged())[:5]
    population = write_population(tmp_path / "q", few, shard_megabytes=megabytes)
    assert population.train.num_examples.tolist() == [len(client.x) for client in few]


@pytest.mark.slow  # a process that imports the package; the tests before this one stop a write within one
def test_a_killed_write_goes_on(tmp_path):
    program = f"""
import os, signal
from fedjax_cluster.data import write_population
from tests.data.test_populations import ragged
def killed():
    for number, client in enumerate(ragged(40)):
        if number == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        yield client
write_population({str(tmp_path / "p")!r}, killed(), shard_megabytes={SMALL})
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    write_population(tmp_path / "p", ragged(40), shard_megabytes=SMALL)
    whole = write_population(tmp_path / "q", ragged(40), shard_megabytes=SMALL)
    for one, other in zip(in_memory(open_population(tmp_path / "p")).train, in_memory(whole).train, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("count", "seed", "said"), [(11, 1, "client 0 is another one now"), (3, 0, "only 3 clients")])
def test_a_write_is_taken_up_with_the_same_clients_only(tmp_path, count, seed, said):
    def stopped():
        yield from ragged()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_population(tmp_path / "p", stopped(), shard_megabytes=SMALL)
    with pytest.raises(ValueError, match=said):
        write_population(tmp_path / "p", ragged(count, seed), shard_megabytes=SMALL)


def cut(folder):
    file = folder / "test-00001.arrayrecord"
    file.write_bytes(file.read_bytes()[:-9])


def edited_index(folder):
    index = np.load(folder / "clients.npy")
    index["group"][0] += 1
    np.save(folder / "clients.npy", index)


def newer(folder):
    content = json.loads((folder / "population.json").read_text())
    content.pop("seal")
    (folder / "population.json").write_text(json.dumps(sealed({**content, "version": 2})))


def edited_manifest(folder):
    text = (folder / "population.json").read_text()
    (folder / "population.json").write_text(text.replace('"num_classes": 3', '"num_classes": 2'))


def unsealed_manifest(folder):
    content = json.loads((folder / "population.json").read_text())
    content.pop("seal")
    content["info"]["num_classes"] = 2
    (folder / "population.json").write_text(json.dumps(content))


DAMAGE = {
    "without its seal": (unsealed_manifest, "population.json is not what was written"),
    "cut": (cut, "has .* bytes of"),
    "a file gone": (lambda folder: (folder / "train-00000.arrayrecord").unlink(), "is missing"),
    "no index": (lambda folder: (folder / "clients.npy").unlink(), "is damaged"),
    "edited index": (edited_index, "is not what was written"),
    "newer": (newer, "has format 2, and this version .* knows 1"),
    "edited": (edited_manifest, "edited or damaged"),
    "foreign": (lambda folder: (folder / "population.json").unlink(), "holds no population"),
    "gone": (shutil.rmtree, "there is no folder"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_one_line(folder, how):
    damage, said = DAMAGE[how]
    damage(folder)
    with pytest.raises(ValueError, match=said) as error:
        open_population(folder)
    assert "\n" not in str(error.value)


def test_damaged_rows_are_found_when_they_are_read(folder):
    population = open_population(folder)
    file = folder / "train-00001.arrayrecord"
    content = bytearray(file.read_bytes())
    for place in range(0, len(content), 7):
        content[place] ^= 255
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"train-00001.* is damaged or gone") as error:
        in_memory(population)
    assert "\n" not in str(error.value)


def test_files_of_other_shards_are_not_read_as_these(tmp_path):
    alike = [(np.full((2, 4), client, np.float32), np.arange(2)) for client in range(4)]
    folder = tmp_path / "p"
    write_population(folder, alike, shard_megabytes=1e-5)
    one, other = (folder / f"train-0000{number}.arrayrecord" for number in (0, 1))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(ValueError, match=r"train-00000.* is damaged or gone \(not the rows that were written\)"):
        in_memory(open_population(folder))


def test_clients_are_chosen_as_numpy_does(folder):
    rows = open_population(folder).train.x
    everybody = in_memory(open_population(folder)).train.x
    assert len(list(rows)) == len(rows) == 11
    for which in (-1, 3, slice(2, 9, 3), [4, -2], np.arange(11) % 3 == 0, (np.array([1, 2]), 0)):
        np.testing.assert_array_equal(rows[which], everybody[which])
    with pytest.raises(IndexError):
        rows[11]
    with pytest.raises(IndexError):
        rows[[0, -12]]


@pytest.mark.parametrize("clients", [[-1], np.arange(11) % 3 == 0, [3, 3]])
def test_some_clients_are_read_with_their_groups(folder, clients):
    population = open_population(folder)
    found, whole = in_memory(population, clients), in_memory(population)
    np.testing.assert_array_equal(found.train.x, whole.train.x[clients])
    np.testing.assert_array_equal(found.group, whole.group[clients])


@pytest.mark.parametrize("clients", [[11], [[0, 1]], 3, ["a"], np.ones(4, bool)])
def test_clients_there_are_not_are_refused(folder, clients):
    with pytest.raises(ValueError, match="clients is") as error:
        in_memory(open_population(folder), clients)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [None, object])
def test_users_keep_their_ids(tmp_path, dtype):
    federation = UserFederation.of(blobs(clients=5), np.array(["ann", "bo", "cy", "di", "ed"], dtype))
    population = write_population(tmp_path / "p", federation)
    assert population.user_ids.tolist() == ["ann", "bo", "cy", "di", "ed"]
    assert in_memory(population, [3, 1]).user_ids.tolist() == ["di", "bo"]
    np.save(tmp_path / "p" / "users.npy", np.array(["x"] * 5))
    with pytest.raises(ValueError, match=r"users\.npy is not what was written"):
        open_population(tmp_path / "p")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_labels_of_any_whole_numbers_are_classes(tmp_path, dtype):
    population = write_population(tmp_path / "p", [(ONE[0], ONE[1].astype(dtype))], test_fraction=0)
    assert population.info.num_classes == 2
    assert population.info.task == "classification"


ONE = np.zeros((2, 4), np.float32), np.arange(2)
MISTAKES = {
    "no clients": ([], "no clients at all"),
    "no rows": ([ONE, (ONE[0][:0], ONE[1][:0])], "client 1 .* no examples"),
    "another shape": ([ONE, (np.zeros((2, 5), np.float32), ONE[1])], "client 1 .* rows of .* give all alike"),
    "another dtype": ([ONE, (np.zeros((2, 4), np.uint8), ONE[1])], "client 1 .* rows of .* give all alike"),
    "not finite": ([ONE, (np.full((2, 4), np.nan), ONE[1])], "client 1 .* NaN or infinity"),
    "x and y": ([(ONE[0], ONE[1][:1])], "client 0 .* differ in examples"),
    "negative": ([(ONE[0], -ONE[1])], "client 0 .* lie between -1"),
    "text": ([(ONE[0], np.array(["a", "b"]))], "client 0 .*number"),
    "a number": ([(np.float32(3), ONE[1])], "client 0 .* x is .*3.0.*: give an array"),
    "group": ([ClientRows(*ONE, group=1.7)], "client 0 .* group is 1.7: number groups from 0"),
    "large group": ([ClientRows(*ONE, group=2**40)], "client 0 .* group is 1099511627776: number groups"),
    "no tuple": ([ONE[0]], "client 0 .* give \\(x, y\\)"),
    "no iterable": (7, "clients is 7"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_clients_that_cannot_be_trained_on_are_refused(tmp_path, mistake):
    clients, said = MISTAKES[mistake]
    with pytest.raises(ValueError, match=said):
        write_population(tmp_path / "p", clients)
    assert not (tmp_path / "p").exists()


def test_validation_rows_are_refused_before_anything_is_made(tmp_path):
    """Fault: an empty folder p.writing stayed behind, as of a write that was stopped."""
    with pytest.raises(ValueError, match=r"write federation\._replace\(validation=None\)"):
        write_population(tmp_path / "p", blobs()._replace(validation=blobs().train))
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_or_read_at_once_unasked(folder):
    with pytest.raises(ValueError, match="exists already"):
        write_population(folder, ragged())
    population = open_population(folder)
    with pytest.raises(ValueError, match=r"bring them into memory with fc\.data\.in_memory"):
        np.asarray(population.train.x)


def test_a_column_of_classes_is_a_row_of_them(tmp_path):
    """Fault: written as y [n, 1], of which a run says so after all has been written."""
    clients = [(np.ones((3, 2), np.float32), np.array([[0], [1], [2]])) for _ in range(2)]
    write_population(tmp_path / "p", clients, test_fraction=0.0)
    assert in_memory(open_population(tmp_path / "p"), [0]).train.y.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("images", [np.full((3, 2, 2), 200.0, np.float32), np.full((3, 2, 2), 9, np.uint8)])
def test_what_looks_unscaled_is_told_once(images, tmp_path, caplog):
    """Though the first client's are well scaled, and with rows to test on."""
    clients = [(images[:, :1] / 255 if images.dtype == np.float32 else images * 20, np.array([0, 1, 2]))]
    clients = [(each if each.shape == images.shape else np.repeat(each, 2, 1), y) for each, y in clients]
    clients += [(images, np.array([0, 1, 2])) for _ in range(4)]
    write_population(tmp_path / "p", clients, test_fraction=0.4)
    assert caplog.text.count("which models d") == 1
