"""What a method of one's own sees and gives, beyond what a step forgets: rows, sums, models, keys, figures."""

import dataclasses
import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import aggregation, local, nn, parallel
from fedjax_cluster.algorithms import fedavg, ifca, scaffold
from fedjax_cluster.algorithms import round as rounds
from fedjax_cluster.lifting import lifted, numbers_of, one_program, path_of
from fedjax_cluster.options import option
from fedjax_cluster.simulation.arguments import further_figures
from fedjax_cluster.simulation.history import summarize, with_figures
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import LocalResult, Variables
from tests.devices import needs_two
from tests.federations import blobs

OWN = local.sgd(0.2, batch_size=4, epochs=1)


class plain(fedavg, abstract=True):
    """Federated averaging of one's own."""


def built(cls=plain, model=None, **options):
    return cls(nn.mlp(hidden=(5,)) if model is None else model, local=OWN, **options)


def run(algorithm, count=7, rounds=2, **options):
    return simulate(algorithm, blobs(clients=count), rounds=rounds, progress=False, **{"eval_every": rounds, **options})


def with_step(**parts):
    """Federated averaging whose named parts are other functions."""
    return type("own", (plain,), parts, abstract=True)


@needs_two
def test_rows_in_place_are_in_the_order_of_the_clients():
    """Divided by work they were other clients' than the numbers said, and a method that clustered by labels erred."""
    seen = {}

    class looking(plain, abstract=True):
        def init(self, rng_key, population):
            seen["init"] = np.asarray(jax.device_get(population.data.y))
            return fedavg.init(self, rng_key, population)

        def step(self, rng_key, state, cohort):
            jax.debug.callback(lambda y: seen.update(step=np.asarray(y)), cohort.data.y)
            return fedavg.step(self, rng_key, state, cohort)

    federation = blobs(clients=6)
    counts = np.array([20, 18, 19, 3, 2, 4], np.int32)  # the first three would be on one device
    federation = federation._replace(train=federation.train._replace(num_examples=counts))
    two = parallel.client_mapping("scan", devices=jax.devices()[:2])
    simulate(built(looking), federation, rounds=1, mapping=two, progress=False)
    for y in seen.values():
        np.testing.assert_array_equal(y, federation.train.y)


@pytest.mark.slow
def test_rows_of_all_clients_are_no_rows_of_a_cohort():
    """They were those of the first clients, whoever took part."""

    def step(self, rng_key, state, cohort):
        slot = rounds.labels(state.clients.membership)
        train = rounds.train_in_cluster(rng_key, self.update, self.model, state.clusters, state.round)
        done = rounds.cluster_round(train, state.clusters, cohort, slot, optimizer=self.optimizer, weighting="examples")
        return state._replace(clusters=done.clusters, round=state.round + 1), done.info(cohort.mask)

    own = with_step(step=step)
    run(built(own))
    with pytest.raises(ValueError, match=r"rows of a cohort of 4 clients have the shape \(7,\); .*gather_rows"):
        run(built(own, participation=0.5), mapping=parallel.client_mapping("scan", devices=jax.devices()[:1]))


def _other_result(self, rng_key, state, cohort):
    rounds.cluster_round(
        lambda client: LocalResult({}, {}, jnp.ones(1), 1, 1),
        state.clusters,
        cohort,
        optimizer=self.optimizer,
        weighting="examples",
    )


def _started(change):
    def init(self, rng_key, population):
        state, info = fedavg.init(self, rng_key, population)
        return change(state), info

    return init


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"step": _other_result}, "train returns a LocalResult; it must return rounds.Trained"),
        ({"select": lambda self, key, state: jnp.arange(3)}, "it must return a Selection"),
        (
            {"init": _started(lambda state: state._replace(round=state.round + 5))},
            "init of own gives round 5; a run begins at round 0",
        ),
        (
            {"init": _started(lambda s: s._replace(clients=s.clients._replace(present=s.clients.present.astype(int))))},
            "init of own gives present as int32; it is bool",
        ),
        ({"personalize": lambda self, *_: Variables({}, {})}, "personalize of own returns a Variables; it must return"),
        (
            {"personalize": lambda self, key, state, data, index: (Variables({"w": jnp.ones(3)}, {}), jnp.ones(2))},
            r"personalize of own returns weights \(2,\) and models whose first axes are \[\(3,\)\]",
        ),
    ],
)
def test_what_a_part_gives_in_another_form_is_one_line_that_names_it(parts, message):
    with pytest.raises(ValueError, match=message):
        run(built(with_step(**parts)))


def test_a_rule_gives_a_row_for_each_cluster():
    class first(aggregation.Aggregation):
        def combine(self, rows, num_slots):
            return jax.tree.map(lambda leaf: leaf[0], rows.value)

    with pytest.raises(ValueError, match=r"combine of first gives .* with a row for each of 1 clusters"):
        run(built(aggregation=first()))


def test_what_is_made_of_an_option_follows_it():
    """Side by side all of a sweep's methods trained with the first one's number."""

    class caching(plain, abstract=True):
        strength: float = option("how much", default=0.1)

        @functools.cached_property
        def update(self):
            return dataclasses.replace(self.local, proximal=self.strength)

    first = built(caching, strength=0.1)
    assert first.update.proximal == 0.1
    with one_program({"strength": 1.0}):
        template, numbers = lifted(first)
    assert numbers == {"strength": 0.1}
    assert template.update.proximal == 1.0

    class keeping(plain, abstract=True):
        strength: float = option("how much", default=0.1)

        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "twice", 2 * self.strength)

    kept = built(keeping, strength=0.3)
    assert "strength" in numbers_of(kept)
    with pytest.raises(ValueError, match="keeping keeps twice, made of its options, which would not follow strength"):
        path_of(kept, "strength")


@needs_two
@pytest.mark.slow
def test_weights_as_large_as_there_are_clients_are_kept_whole(tmp_path):
    """A server's square leaf was taken for a matrix of clients, and lost the row of the client that was added."""
    two = parallel.client_mapping("scan", devices=jax.devices()[:2])
    algorithm = scaffold(nn.mlp(hidden=(8, 8)), local=OWN)
    whole = run(algorithm, rounds=6, eval_every=3, mapping=two)
    for count in (3, 6):
        found = run(algorithm, rounds=count, eval_every=3, mapping=two, run_dir=tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, found.state.server, whole.state.server)


@pytest.mark.slow
def test_a_key_in_the_state_is_read_back(tmp_path):
    class keyed(plain, abstract=True):
        def init(self, rng_key, population):
            state, info = fedavg.init(self, rng_key, population)
            return state._replace(server=(state.server, rng_key)), info

        def step(self, rng_key, state, cohort):
            server, key = state.server
            state, info = fedavg.step(self, rng_key, state._replace(server=server), cohort)
            return state._replace(server=(state.server, jax.random.split(key)[0])), info

    whole = run(built(keyed), rounds=3, eval_every=1)
    for count in (1, 3):
        found = run(built(keyed), rounds=count, eval_every=1, run_dir=tmp_path / "run")
    assert len(found.history["round"]) == 3
    np.testing.assert_array_equal(*(jax.random.key_data(each.state.server[1]) for each in (found, whole)))


def test_figures_of_every_round_are_in_the_summary():
    """They were told from a round's report by rounds without them, of which there are none."""
    for every in (1, 3):
        found = run(built(), rounds=3, eval_every=every, callbacks=[lambda evaluation: {"confidence": 0.5}])
        assert found.summary["confidence"] == 0.5


def test_no_figure_takes_the_name_of_something_that_a_summary_has():
    result = run(built(), rounds=1)
    summary = summarize(result.algorithm, result.federation, result.state, result.history, 0, 0.0)
    metrics = {"accuracy", "balanced_accuracy"}  # which `evaluate` gives, and are refused as known
    for name in summary.keys() - metrics:
        with pytest.raises(ValueError, match=f"a callback gives '{name}', which a run has already"):
            run(built(), rounds=1, callbacks=[lambda evaluation, name=name: {name: 1.0}])


@pytest.mark.slow
def test_predictions_may_be_several_arrays():
    """Beyond 64 test rows, or of a mixture, they had to be one."""
    model = nn.mlp(hidden=(5,))
    several = model._replace(
        predict=lambda outputs: {"p": model.predict(outputs), "q": outputs},
        metrics=lambda predictions, y, mask: model.metrics(predictions["p"], y, mask),
    )
    federation = blobs(clients=4, rows=20)
    test = jax.tree.map(lambda leaf: np.repeat(leaf, 8, 1) if leaf.ndim > 1 else leaf * 8, federation.test)
    federation = federation._replace(test=test)
    for kind, options in ((plain, {}), (ifca, {"clusters": 2})):
        found, expected = (
            simulate(built(kind, of, **options), federation, rounds=2, progress=False) for of in (several, model)
        )
        np.testing.assert_array_equal(found.per_client.accuracy, expected.per_client.accuracy)


@pytest.mark.parametrize("value", [np.str_("good"), np.complex64(1j), 10**400, np.zeros(2), "0.5", None])
def test_a_figure_that_is_no_number_is_refused_where_it_is_given(value):
    """A word without a length went into the history, and ended the run where its summary was made."""
    with pytest.raises(ValueError, match=r"a callback gives 'mine' as .*; it must be a number"):
        further_figures({}, {"mine": value}, "a callback")


@pytest.mark.parametrize(
    "value", [fractions.Fraction(1, 2), 2**70, np.float16(0.5), True, np.bool_(True), jnp.ones(())]
)
def test_every_kind_of_number_is_a_figure(value):
    history = with_figures({"round": np.arange(2)}, further_figures({}, {"mine": value}, "a callback"))
    assert history["mine"].dtype == np.float64
    assert history["mine"][1] == float(value)
