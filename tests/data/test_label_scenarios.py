import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_cluster.data import digits, scenarios
from fedjax_cluster.data.scenarios import overlap


@settings(max_examples=30)
@given(
    clients=st.integers(1, 15),
    alpha=st.sampled_from([0.0, 1e-3, 0.3, 10.0]),
    client_sizes=st.sampled_from(["free", "equal"]),
    examples_per_client=st.one_of(st.none(), st.integers(10, 40)),
)
def test_dirichlet_sizes(clients, alpha, client_sizes, examples_per_client):
    federation = scenarios.dirichlet(
        digits(), clients=clients, alpha=alpha, client_sizes=client_sizes, examples_per_client=examples_per_client
    )
    sizes = federation.train.num_examples + federation.test.num_examples
    assert sizes.sum() == (clients * examples_per_client if examples_per_client else 1797)
    assert sizes.min() >= 10
    if client_sizes == "equal":
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("client_sizes", ["free", "equal"])
def test_dirichlet_training_and_test_labels_are_of_one_kind(client_sizes, numbered):
    federation = scenarios.dirichlet(numbered(20_000), clients=5, alpha=0.3, client_sizes=client_sizes)
    for client in range(5):
        train, test = (
            np.bincount(part.y[client, : part.num_examples[client]], minlength=10) / part.num_examples[client]
            for part in (federation.train, federation.test)
        )
        np.testing.assert_allclose(train, test, atol=0.1)
    assert federation.group is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": -0.1}, "alpha is -0.1"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"client_sizes": "fixed"}, "'free' or 'equal'"),
        ({"min_examples": 1}, "min_examples is 1"),
        ({"min_examples": 500}, "too few for 500 each"),
    ],
)
def test_dirichlet_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.dirichlet(digits(), **{"clients": 4, "alpha": 1.0, **arguments})


def _classes(federation, classes: int) -> np.ndarray:
    """[M, classes]: each client's number of examples of each class, training and test together."""
    return np.array(
        [
            sum(
                np.bincount(part.y[client, : part.num_examples[client]], minlength=classes)
                for part in (federation.train, federation.test)
            )
            for client in range(len(federation.train.y))
        ]
    )


def test_dirichlet_with_free_sizes_on_a_part_of_the_examples(numbered):
    # At zero a class has one client; few rows move to clients with too few.
    federation = scenarios.dirichlet(numbered(2000), clients=3, alpha=0, examples_per_client=300, min_examples=2)
    counts = _classes(federation, 10)
    assert counts.sum() == 900
    assert (counts.max(axis=0) > 0.9 * counts.sum(axis=0)).all()


def test_heterogeneity_levels_differ_as_they_say(numbered):
    federation = scenarios.heterogeneity_levels(numbered(20_000), clients=40, shares=(10, 20, 10))
    counts = _classes(federation, 10)
    np.testing.assert_array_equal(counts.sum(axis=1), 400)
    largest = counts.max(axis=1) / 400
    assert federation.info.group_names == ("homogeneous", "heterogeneous", "extreme")
    assert largest[federation.group == 0].max() < 0.2
    assert 0.5 < largest[federation.group == 1].mean() < 1.0
    np.testing.assert_array_equal(largest[federation.group == 2], 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shares": (1, 2)}, "2 shares and 3 alphas do not fit"),
        ({"alphas": (1,)}, "3 shares and 1 alphas do not fit"),
        ({"alphas": (1, -1, 0)}, "alphas is"),
        ({"shares": (1, 1000, 0)}, "without any"),
    ],
)
def test_heterogeneity_levels_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.heterogeneity_levels(digits(), **{"clients": 10, **arguments})


@pytest.mark.parametrize("overlap", ["auto", "never"])
def test_label_groups_hold_their_labels_and_no_others(numbered, overlap):
    federation = scenarios.label_groups(numbered(5000), clients=20, overlap=overlap)
    counts = _classes(federation, 10)
    owned = np.array([counts[federation.group == group].sum(axis=0) > 0 for group in range(5)])
    np.testing.assert_array_equal(owned.sum(axis=1), 2)
    np.testing.assert_array_equal(owned.sum(axis=0), 1)
    for group, name in enumerate(federation.info.group_names):
        assert name == "labels " + " ".join(map(str, np.flatnonzero(owned[group])))
    assert counts.sum() == 5000
    assert counts.sum(axis=1).max() > 2 * counts.sum(axis=1).min() >= 20


def test_label_groups_that_share_labels(numbered):
    federation = scenarios.label_groups(numbered(5000), clients=20, rho=0.3, alpha=100)
    counts = _classes(federation, 10)
    owned = np.array([counts[federation.group == group].sum(axis=0) > 0 for group in range(5)])
    np.testing.assert_array_equal(owned.sum(axis=1), 3)
    assert owned.sum(axis=0).max() > 1
    assert len({tuple(row) for row in owned}) == 5
    shared = np.argmax(owned.sum(axis=0))
    holders = counts[:, shared][counts[:, shared] > 0]
    assert len(holders) == 4 * owned[:, shared].sum()
    assert holders.max() < 3 * holders.min()


@pytest.mark.parametrize("seed", range(3))
def test_label_groups_tested_on_as_many_rows_of_each_label(numbered, seed):
    """Every label of the client counts the same, and no client is tested on what any client trains on."""
    examples = numbered(6000)
    arguments = {"clients": 20, "rho": 0.3, "alpha": 0.2, "seed": seed}
    default = scenarios.label_groups(examples, **arguments)
    federation = scenarios.label_groups(examples, tests_per_label=40, **arguments)
    for first, second in zip(federation.train, default.train, strict=True):
        np.testing.assert_array_equal(first, second)
    trained = [set(map(float, x[:n, 0, 0])) for x, _, n in zip(*federation.train, strict=True)]
    for client, (x, y, number) in enumerate(zip(*federation.test, strict=True)):
        held = np.unique(federation.train.y[client, : federation.train.num_examples[client]])
        values, counts = np.unique(y[:number], return_counts=True)
        assert values.tolist() == held.tolist()
        assert set(counts) == {40}
        assert not set(map(float, x[:number, 0, 0])) & set().union(*trained)
        assert len(set(map(float, x[:number, 0, 0]))) == number
    assert len(set(federation.test.num_examples)) > 1


@pytest.mark.parametrize("seed", range(5))
def test_label_groups_are_never_the_same_twice(numbered, seed):
    federation = scenarios.label_groups(numbered(300, num_classes=3), clients=3, num_groups=3, rho=0.67, seed=seed)
    assert sorted(federation.info.group_names) == ["labels 0 1", "labels 0 2", "labels 1 2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rho": 0}, "rho is 0"),
        ({"rho": 1.5}, "rho is 1.5"),
        ({"rho": 0.3, "overlap": "never"}, "need 15 labels, but there are 10"),
        ({"overlap": "no"}, "'never'"),
        ({"rho": 1.0}, "not 5 different sets of 10"),
        ({"clients": 4}, "too few for 5 groups"),
        ({"alpha": -1}, "alpha is -1"),
        ({"min_examples": 0}, "min_examples is 0"),
        ({"tests_per_label": 0}, "tests_per_label is 0"),
        ({"tests_per_label": 900}, "tests_per_label=900, but the rarest label has"),
    ],
)
def test_label_groups_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.label_groups(digits(), **{"clients": 10, **arguments})


@pytest.mark.parametrize(
    ("name", "totals", "of_classes"),
    [
        ("mnist", [17500, 14500, 14500, 13500], [6000] * 10),
        ("fashion_mnist", [14500, 15500, 14500, 15500], [6000] * 10),
        ("cifar10", [12498, 12500, 13334, 11668], [5000] * 10),
    ],
)
def test_tables_add_up_as_printed(name, totals, of_classes):
    table = np.array(overlap.TABLES[name])
    np.testing.assert_array_equal(table.sum(axis=1), totals)
    np.testing.assert_array_equal(table.sum(axis=0), of_classes)
    np.testing.assert_array_equal((table > 0).sum(axis=1), 8)


def test_class_overlap_follows_the_table(numbered):
    examples = numbered(12_000)
    federation = scenarios.class_overlap(examples, clients=8, table="mnist")
    counts = _classes(federation, 10)
    clusters = counts.reshape(4, 2, 10).sum(axis=1)
    table = np.array(overlap.TABLES["mnist"])
    expected = table / table.sum(axis=0) * np.bincount(examples.y)
    assert np.abs(clusters - expected).max() <= 1
    for pair in counts.reshape(4, 2, 10):
        assert abs(int(pair[0].sum()) - int(pair[1].sum())) <= 1
        np.testing.assert_allclose(pair[0], pair[1], atol=6 * np.sqrt(pair.max()))


def test_class_overlap_takes_the_printed_table_of_its_data_set(numbered):
    examples = numbered(2000)
    for name, other in (("mnist", "mnist"), ("digits", "mnist"), ("cifar10", "cifar10")):
        named = examples._replace(info=examples.info._replace(name=name))
        by_default = scenarios.class_overlap(named, clients=4)
        assert by_default.info.group_names == scenarios.class_overlap(named, clients=4, table=other).info.group_names


def test_class_overlap_draws_a_table_for_others(numbered):
    # The rule for EMNIST: 8 clusters with 40 of 47 classes.
    federation = scenarios.class_overlap(numbered(9000, num_classes=47), clients=16, num_groups=8, classes_per_group=40)
    held = np.array([_classes(federation, 47)[federation.group == group].sum(axis=0) > 0 for group in range(8)])
    np.testing.assert_array_equal(held.sum(axis=1), 40)
    lacking = (~held).sum(axis=0)
    assert lacking.max() - lacking.min() <= 1
    assert len({tuple(row) for row in held}) == 8
    first, second = (
        scenarios.class_overlap(numbered(900), clients=5, num_groups=5, seed=seed).info.group_names for seed in (0, 1)
    )
    assert first != second


def test_class_overlap_takes_amounts():
    federation = scenarios.class_overlap(digits(), clients=2, table=[[1] * 10, [3] * 9 + [0]])
    counts = _classes(federation, 10)
    np.testing.assert_allclose(counts[1, :9] / counts[0, :9], 3, rtol=0.05)
    np.testing.assert_array_equal(counts[:, 9], [180, 0])
    assert federation.info.group_names == ("all", "without 9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": "svhn"}, "no table 'svhn'"),
        ({"table": [[1, 2]]}, "each of the 10 classes"),
        ({"table": [[1] * 10, [0] * 10]}, "without any class"),
        ({"table": [[-1] * 10]}, "negative"),
        ({"num_groups": 0}, "num_groups is 0"),
        ({"classes_per_group": 11}, "classes_per_group=11"),
    ],
)
def test_class_overlap_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.class_overlap(digits(), **{"clients": 10, **arguments})


def _renaming(federation, examples) -> np.ndarray:
    """[M, classes]: what each client calls each class, by the numbers planted in the images."""
    table = np.full((len(federation.train.y), examples.info.num_classes), -1)
    for part in (federation.train, federation.test):
        for client, count in enumerate(part.num_examples):
            true = examples.y[part.x[client, :count, 2, 2].astype(int) - 1]
            for label, name in zip(true, part.y[client, :count], strict=True):
                assert table[client, label] in (-1, name)
                table[client, label] = name
    assert (table >= 0).all()
    return table


def test_label_swap_exchanges_two_labels_and_no_others(numbered):
    examples = numbered(4000)
    table = _renaming(scenarios.label_swap(examples, clients=8, pairs=((1, 7), (3, 5))), examples)
    np.testing.assert_array_equal(table[:4], [[0, 7, 2, 3, 4, 5, 6, 1, 8, 9]] * 4)
    np.testing.assert_array_equal(table[4:], [[0, 1, 2, 5, 4, 3, 6, 7, 8, 9]] * 4)


def test_balanced_label_swap_gives_every_client_each_label_equally_often(numbered):
    examples = numbered(4000)
    pairs = ((1, 7), (3, 5))
    federation = scenarios.label_swap(examples, clients=8, pairs=pairs, balanced=True, examples_per_client=60)
    for part, each in ((federation.train, 4), (federation.test, 2)):
        counts = [np.bincount(y[:n], minlength=10) for y, n in zip(part.y, part.num_examples, strict=True)]
        np.testing.assert_array_equal(counts, np.full((8, 10), each))
    assert not (np.diff(federation.train.y, axis=1) >= 0).all(1).any()  # labels are not in order
    table = _renaming(federation, examples)
    assert [[table[i, c] for c in (1, 7, 3, 5)] for i in (0, 7)] == [[7, 1, 3, 5], [1, 7, 5, 3]]


@pytest.mark.parametrize(("groups", "classes"), [(4, 10), (5, 10), (6, 4), (3, 3)])
def test_label_swap_draws_pairs(numbered, groups, classes):
    federation = scenarios.label_swap(numbered(4000, num_classes=classes), clients=groups, num_groups=groups)
    pairs = [tuple(map(int, name.split("↔"))) for name in federation.info.group_names]
    assert len(set(pairs)) == groups
    assert all(one < other < classes for one, other in pairs)
    if 2 * groups <= classes:
        assert len({label for pair in pairs for label in pair}) == 2 * groups


def test_label_permutation_is_one_to_one_and_different_in_each_group(numbered):
    examples = numbered(4000)
    federation = scenarios.label_permutation(examples, clients=8)
    table = _renaming(federation, examples)
    np.testing.assert_array_equal(np.sort(table, axis=1), [range(10)] * 8)
    np.testing.assert_array_equal(table[::2], table[1::2])
    assert len({tuple(row) for row in table}) == 4


def test_label_permutation_finds_all_there_are(numbered):
    federation = scenarios.label_permutation(numbered(2000, num_classes=3), clients=6, num_groups=6)
    assert len(federation.info.group_names) == 6


def test_label_shift_adds_modulo_the_classes(numbered):
    examples = numbered(4000)
    table = _renaming(scenarios.label_shift(examples, clients=4, shifts=(0, 5)), examples)
    np.testing.assert_array_equal(table[0], range(10))
    np.testing.assert_array_equal(table[3], [5, 6, 7, 8, 9, 0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("label_swap", {"pairs": ((1, 1),)}, "two different labels"),
        ("label_swap", {"pairs": ((1, 10),)}, "between 0 and 9"),
        ("label_swap", {"pairs": ((1, 2), (2, 1))}, "none twice"),
        ("label_swap", {"pairs": ()}, "at least one pair"),
        ("label_swap", {"num_groups": 46}, "46 different pairs"),
        ("label_swap", {"balanced": True, "examples_per_client": 25}, "choose 20 or 30"),
        ("label_permutation", {"num_groups": 0}, "num_groups is 0"),
        ("label_shift", {"shifts": (0, 10)}, "different ones modulo the 10"),
        ("label_shift", {"shifts": ()}, "at least one"),
        ("label_shift", {"clients": 1}, "too few for 2 groups"),
    ],
)
def test_renaming_scenarios_refuse(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(scenarios, name)(digits(), **{"clients": 50, **arguments})


def test_clients_of_one_class_that_get_more_are_logged(caplog):
    examples = digits()
    arguments = {"clients": 20, "shares": (10, 0, 10)}
    few = scenarios.heterogeneity_levels(examples, **arguments, examples_per_client=20)
    classes = [len(np.unique(y[:n])) for y, n in zip(few.train.y, few.train.num_examples, strict=True)]
    assert classes[10:] == [1] * 10
    assert not caplog.records
    scenarios.heterogeneity_levels(examples, **arguments, examples_per_client=85)
    assert "clients of α = 0 have more than one class" in caplog.text
