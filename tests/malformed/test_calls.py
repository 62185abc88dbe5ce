"""A malformed call of a public function is refused in one line that names the argument, by this package itself."""

import pathlib
import traceback

import pytest

import fedjax_cluster
from tests.malformed import calls, clustering_calls

PACKAGE = pathlib.Path(fedjax_cluster.__file__).parent
GROUPS = ("methods", "data", "runs", "models", "clustering")
# What a message calls an argument by another name.
ALSO = {
    "examples": "data sets",
    "num_clusters": "clusters",
    "y": "Labels",
    "client_ids": "The client",
    "new": "old has",
    "labels_a": "labels_b has",
    **dict.fromkeys(("model_options", "method_options", "scenario_options"), "has no option"),
}


def fault(call, accepted):
    """What is wrong with how a call is refused; None where nothing is."""
    try:
        call.function(**call.given)
    except accepted:
        return "accepted"
    except (ValueError, TypeError) as error:
        message, frames = str(error), traceback.extract_tb(error.__traceback__)
        if PACKAGE not in pathlib.Path(frames[-1].filename).parents:
            return f"raised by {frames[-1].filename}: {message}"
        if "\n" in message:
            return f"several lines: {message}"
        named = call.argument in message or ALSO.get(call.argument, call.argument) in message
        return None if named else f"does not name it: {message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def specs_of(group):
    return getattr(clustering_calls if group == "clustering" else calls, group)()


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_a_malformed_call_is_refused_in_one_line_that_names_the_argument(group, stopped):
    found = [call for spec in specs_of(group) for call in spec.calls()]
    assert len(found) >= 400
    faults = {call.name: text for call in found if (text := fault(call, stopped)) is not None}
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_the_calls_are_good_but_for_the_one_argument(group, stopped):
    for spec in specs_of(group):
        if not {"no-such-directory", "no_such_set", "no-such-path"} & {str(given) for given in spec.given.values()}:
            try:
                spec.function(**spec.given)
            except stopped:
                continue
