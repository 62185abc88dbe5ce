"""What a new method costs: this file, and it has its flags, help, checks, configuration, tests and place in `list`."""

import io

import pytest
from rich.console import Console

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import REGISTRY, fedavg
from fedjax_cluster.algorithms.method import AveragingMethod
from fedjax_cluster.experiments import config, flags
from fedjax_cluster.options import POSITIVE, changed, option
from fedjax_cluster.recipes import catalogue
from tests.algorithms import test_protocol as protocol


class pull(fedavg, abstract=True):
    """Federated averaging with a proximal term, a share of its strength in every local step."""

    strength: float = option("pull of the round's start model", default=0.1, bound=POSITIVE)
    shared_by: int = option("local steps that it is divided among", default=5)

    @property
    def update(self):
        return changed(self.local, "pulled", proximal=self.strength / self.shared_by)


def test_it_has_its_flags_help_checks_configuration_and_place_in_the_list(monkeypatch):
    monkeypatch.setitem(REGISTRY, "pull", pull)
    parsed, _ = flags.parse_run("pull", ["--strength", "0.3", "--local-steps", "2"], "run")
    built = config.build_algorithm(parsed)
    assert (built.strength, built.config["shared_by"]) == (0.3, 5)
    with pytest.raises(ValueError, match=r"strength is -1\.0; it must be a number, positive and finite"):
        config.build_algorithm(flags.parse_run("pull", ["--strength", "-1"], "run")[0])
    assert "strength: pull of the round's start model" in pull.__doc__
    catalogue.show(Console(file=(shown := io.StringIO()), width=200))
    assert "Federated averaging with a proximal term, a share of its strength in every local step." in shown.getvalue()


def test_what_it_inherits_is_of_32_bits_too():
    """A `select` called by hand drew other clients than `simulate`, which is of 32 bits itself."""
    algorithm, population, state, _ = protocol.started("fedavg", 0.4)
    data = protocol.jax.tree.map(lambda leaf: leaf[0], population.data)
    found = []
    for wide in (False, True):
        with protocol.jax.enable_x64(wide):
            key = protocol.jax.random.key(3)
            found.append((algorithm.select(key, state), algorithm.personalize(key, state, data, 0)))
    protocol.chex.assert_trees_all_equal(*found)
    protocol.chex.assert_trees_all_equal_shapes_and_dtypes(*found)


def test_one_without_its_functions_says_which_it_lacks():
    class idle(AveragingMethod, abstract=True):
        """Does nothing."""

    method = idle(nn.linear(), local=local.sgd(0.1, batch_size=2, steps=1))
    for name, given in (("init", (None, None)), ("step", (None, None, None))):
        with pytest.raises(NotImplementedError, match=f"idle has no {name}; a method needs init and step of its own"):
            getattr(method, name)(*given)


QUICK = ("names_and_order", "32_bits", "selection", "empty_cluster", "personalize", "newcomer_joins", "impossible")


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        name if any(word in name for word in QUICK) else pytest.param(name, marks=pytest.mark.slow)
        for name in vars(protocol)
        if name.startswith("test_")
    ],
)
def test_it_keeps_the_protocol(monkeypatch, test):
    monkeypatch.setitem(REGISTRY, "pull", pull)
    protocol.call(getattr(protocol, test), "pull")
