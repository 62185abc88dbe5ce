import inspect

import chex
import numpy as np
import pytest

from fedjax_cluster.data import check_federation, digits, npz
from fedjax_cluster.data.scenarios import SCENARIOS, registry
from fedjax_cluster.types import Examples, Federation

DRAWN = {"linear_regression", "xor", "channels", "topics"}  # need no examples
RENAMING = {"label_swap", "label_permutation", "label_shift"}  # change what a label means
COUNT = 251


def _build(name: str, examples: Examples, **arguments) -> Federation:
    source = None if name in DRAWN else examples
    extra = {}
    if name == "mixed_datasets":
        source = [examples._replace(x=examples.x.astype(np.uint16) + offset) for offset in (0, 1000)]
        extra = {"angles": [(0, 15, 90), (0,)]}
    elif name == "domains":
        extra = {"noise": 0, "blur": 0}  # so that the numbers stay legible
    elif name == "label_groups":
        extra = {"min_examples": 2}
    elif name == "users":
        extra = {"user_ids": np.arange(len(examples.y)) % 12}
    return SCENARIOS[name](source, **{"clients": 12, **extra, **arguments})


def test_a_scenario_that_gives_no_federation_is_named(monkeypatch):
    monkeypatch.setattr("fedjax_cluster.data.scenarios.registry.SCENARIOS", {})

    @registry.scenario
    def mine(examples, *, clients, seed=0):
        return examples

    with pytest.raises(ValueError, match="scenario mine returns a Examples; it must return a Federation"):
        mine(digits(), clients=2)


def test_users_that_a_scenario_leaves_unheeded_are_named(tmp_path, caplog):
    arrays = {"x": np.zeros((40, 4, 4), np.uint8), "y": np.arange(40) % 2, "user": np.arange(40) % 4}
    np.savez(tmp_path / "mine.npz", **arrays, users=arrays["user"])
    examples = npz(tmp_path / "mine.npz")
    assert caplog.messages == [
        f"{tmp_path / 'mine.npz'}: users is left out; what is read are x, y and, of users, user, group and split"
    ]
    caplog.clear()
    SCENARIOS["users"](examples)
    SCENARIOS["shards"](examples._replace(), clients=4)  # plain examples
    assert not caplog.messages
    SCENARIOS["shards"](examples=examples, clients=4)
    SCENARIOS["mixed_datasets"]([examples, examples], clients=4, angles=[(0,), (0,)])
    assert [message.partition(" names users, but ")[2].partition(" ")[0] for message in caplog.messages] == [
        "shards",
        "mixed-datasets",
        "mixed-datasets",
    ]


def _source_rows(federation: Federation) -> list[np.ndarray]:
    """The planted numbers of each client's rows: the middle pixel, which no rotation moves."""
    return [
        np.concatenate(
            [part.x[client, : part.num_examples[client], 2, 2] for part in (federation.train, federation.test)]
        )
        for client in range(len(federation.train.x))
    ]


every = pytest.mark.parametrize("name", sorted(SCENARIOS))
of_images = pytest.mark.parametrize("name", sorted(set(SCENARIOS) - DRAWN))


@every
def test_signatures_agree(name):
    parameters = inspect.signature(SCENARIOS[name]).parameters
    assert next(iter(parameters)) == "examples"
    assert {"clients", "seed", "test_fraction", "examples_per_client"} <= set(parameters)
    assert parameters["seed"].default == 0
    assert parameters["test_fraction"].default == 0.3
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[1:])


@every
def test_federations_are_valid_and_of_fixed_types(name, numbered):
    federation = _build(name, numbered(COUNT))
    if name != "mixed_datasets":  # numbered beyond what an image's bytes hold
        check_federation(federation, 12)
    assert isinstance(federation.train.x, np.ndarray)
    for part in (federation.train, federation.test):
        sizes, one = chex.Dimensions(M=12, N=part.x.shape[1]), federation.info.input_shape
        target = one if name in ("channels", "topics") else ()
        chex.assert_shape(list(part), [(*sizes["MN"], *one), (*sizes["MN"], *target), sizes["M"]])
        usual = np.float32 if name in DRAWN else np.uint8
        x = {"mixed_datasets": np.uint16, "topics": np.int32}.get(name, usual)
        y = np.float32 if name in ("linear_regression", "channels") else np.int32
        assert [array.dtype for array in part] == [x, y, np.int32]
    if federation.group is not None:
        chex.assert_shape(federation.group, (12,))
        assert federation.group.dtype == np.int32
        assert len(federation.info.group_names) == federation.group.max() + 1


@every
def test_docstrings_describe_every_argument(name):
    """The command line shows them; those that all scenarios take are added by the registry."""
    documentation = inspect.getdoc(SCENARIOS[name])
    for argument in inspect.signature(SCENARIOS[name]).parameters:
        assert documentation.count(f"\n  {argument}: ") == 1


@of_images
def test_no_row_is_used_twice_and_none_is_lost(name, numbered):
    rows = np.concatenate(_source_rows(_build(name, numbered(COUNT))))
    wanted = np.arange(1, COUNT + 1)
    if name == "mixed_datasets":
        wanted = np.concatenate([wanted, wanted + 1000])
    if name == "heterogeneity_levels":  # leaves a fifth for those who draw last
        assert len(np.unique(rows)) == len(rows) == 12 * 16
        assert set(rows) < set(wanted)
    else:
        np.testing.assert_array_equal(np.sort(rows), wanted)


@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - DRAWN - RENAMING))
def test_labels_stay_with_their_images(name, numbered):
    examples = numbered(COUNT)
    for part in _build(name, examples)[:2]:
        for client, count in enumerate(part.num_examples):
            numbers = (part.x[client, :count, 2, 2].astype(int) - 1) % 1000
            np.testing.assert_array_equal(part.y[client, :count], examples.y[numbers])


@every
def test_seeds_decide(name, numbered):
    examples = numbered(COUNT)
    first, again, other = (_build(name, examples, seed=seed)[:2] for seed in (3, 3, 4))
    chex.assert_trees_all_equal(first, again)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(first, other)


@every
def test_padding_is_zero(name, numbered):
    federation = _build(name, numbered(COUNT), clients=7)
    for part in (federation.train, federation.test):
        beyond = np.arange(part.x.shape[1]) >= part.num_examples[:, None]
        assert not part.x[beyond].any()
        assert not part.y[beyond].any()


@of_images
def test_examples_per_client_and_test_fraction(name, numbered):
    federation = _build(name, numbered(COUNT), examples_per_client=16, test_fraction=0.25)
    train, test = federation.train.num_examples, federation.test.num_examples
    if name in ("dirichlet", "label_groups", "size_skew"):  # sizes are free: so many on average
        assert (train + test).sum() == 12 * 16
        assert np.abs(test - 0.25 * (train + test)).max() <= 0.5
    else:
        np.testing.assert_array_equal(train, 12)
        np.testing.assert_array_equal(test, 4)


@of_images
def test_the_test_fraction_does_not_move_rows_between_clients(name, numbered):
    examples = numbered(COUNT)
    for first, second in zip(
        _source_rows(_build(name, examples, test_fraction=0.2)),
        _source_rows(_build(name, examples, test_fraction=0.6)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.sort(first), np.sort(second))


@every
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "clients is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"test_fraction": 1.5}, "test_fraction is 1.5"),
        ({"examples_per_client": 1}, "examples_per_client is 1;"),
    ],
)
def test_common_arguments_are_checked(name, arguments, message, numbered):
    with pytest.raises(ValueError, match=message):
        _build(name, numbered(COUNT), **arguments)


@of_images
def test_too_few_examples(name, numbered):
    with pytest.raises(ValueError, match=r"ask for (at most|fewer clients)"):
        _build(name, numbered(COUNT), clients=700)
    if name != "users":  # takes what a user has
        with pytest.raises(ValueError, match="at most"):
            _build(name, numbered(COUNT), examples_per_client=500)


def test_users_with_too_few_examples_are_named(caplog):
    examples = digits()
    user = np.arange(len(examples.y)) % 7
    user[:2] = 90, 91
    assert len(SCENARIOS["users"](examples, user_ids=user).train.num_examples) == 7
    assert caplog.messages == ["2 of 9 users have fewer than 2 examples and are left out: 90, 91"]
