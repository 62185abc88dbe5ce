"""What methods and true groups are called in tables and pictures."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_cluster.types import Churn

PRINTED = (
    *("CFL", "CFL-GP", "Ditto", "FairAvg", "FedAvg", "FedAvgM", "FedEM", "FedGWC", "FedPer", "FedProto", "FedProx"),
    *("FedRep", "FedSoft", "FeSEM", "FLAG", "IFCA", "Local only", "PACFL", "Per-FedAvg", "pFedMe", "SCAFFOLD"),
    *("FlexCFL", "StoCFL"),
)
METHOD_NAMES = {name.lower().replace("-", "_").replace(" ", "_"): name for name in PRINTED}
METHOD_NAMES |= {"fl_hc": "FL+HC", "gradient_loss": "Gradient and loss"}
COUNTED = ("rounds", "clients")  # settings whose number comes before their name
LONGEST_WORD, LONGEST_LABEL, LONGEST_CLASS = 20, 60, 15  # characters of a group's, and a class's, name in a picture


def method_name(name: str) -> str:
    """A method's name as papers print it; any other text unchanged.

    >>> method_name("cfl_gp"), method_name("cfl-gp"), method_name("ours, P=1")
    ('CFL-GP', 'CFL-GP', 'ours, P=1')
    """
    return METHOD_NAMES.get(name.replace("-", "_"), name)


def over_seeds(counts: Iterable[int]) -> str:
    """Over how many seeds results vary; "" where there are no several.

    >>> over_seeds([3, 3]), over_seeds([3, 1, 2]), over_seeds([1])
    ('over 3 seeds', 'over 2 or 3 seeds', '')
    """
    several = sorted({count for count in counts if count > 1})
    return f"over {' or '.join(map(str, several))} seeds" if several else ""


def counted(count: float, thing: str) -> str:
    """A number of things.

    >>> counted(1, "round"), counted(0, "time"), counted(1200, "client")
    ('1 round', '0 times', '1,200 clients')
    """
    return f"{count:,.0f} {thing}{'' if count == 1 else 's'}"


def group_name(group: int, names: Sequence[str]) -> str:
    """A true group's name, or its index where it has none.

    >>> group_name(1, ("rain", "sun")), group_name(2, ("rain", "sun")), group_name(-1, ())
    ('sun', 'group 2', 'unknown')
    """
    if group < 0:
        return "unknown"
    return names[group] if group < len(names) else f"group {group}"


def group_label(group: int, names: Sequence[str]) -> str:
    """`group_name` for a picture: dollars are no formula, and what is too long for it is cut.

    >>> print(group_label(0, ("from $5 on",)), group_label(0, ("Donaudampfschifffahrtsgesellschaft",)), sep="; ")
    from \\$5 on; Donaudampfschifffah…
    """
    words = group_name(group, names).split()
    return pictured(_cut(" ".join(_cut(word, LONGEST_WORD) for word in words), LONGEST_LABEL))


def class_labels(classes: int, names: Sequence[str] = ()) -> list[str]:
    """What classes are called in a picture: their names, of which what is too long is cut, or their numbers.

    Raises:
      ValueError: names of some classes alone.

    >>> class_labels(2), class_labels(2, ("cat", "domestic dog"))
    (['0', '1'], ['cat', 'domestic dog'])
    """
    names = list(map(str, names))
    if len(names) not in (0, classes):
        raise ValueError(f"class_names has {len(names)} names for {classes} classes: give one for each, or none")
    return [pictured(_cut(" ".join(name.split()), LONGEST_CLASS)) for name in names] or list(map(str, range(classes)))


def pictured(text: str) -> str:
    """Any name for a picture, where dollars are no formula, and what begins with a line is no line's hidden name.

    >>> print(pictured("$x"), pictured("_mine"))
    \\$x  _mine
    """
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip()}…"


def option_name(name: str) -> str:
    """A setting's or an option's name as a heading has it.

    >>> option_name("method_options.every"), option_name("learning_rate")
    ('every', 'learning rate')
    """
    return name.rpartition(".")[2].replace("_", " ")


def option_names(options: Iterable[str]) -> dict[str, str]:
    """Each option's name as headings have it; of those that end alike the whole of it.

    >>> option_names(["learning_rate", "server.learning_rate", "method_options.every"])
    {'learning_rate': 'learning rate', 'server.learning_rate': 'server learning rate', 'method_options.every': 'every'}
    """
    options = list(options)
    ends = collections.Counter(map(option_name, options))
    whole = {each: each.replace("_options.", " ").replace(".", " ").replace("_", " ") for each in options}
    return {each: option_name(each) if ends[option_name(each)] == 1 else whole[each] for each in options}


def label_of(values: Mapping[str, Any]) -> str:
    """What a combination of options' values is called.

    >>> label_of({"learning_rate": 0.01, "every": 2})
    'learning rate 0.01, every 2'
    """
    names = option_names(values)
    return ", ".join(f"{names[name]} {value_text(of)}" for name, of in values.items())


def value_text(value: object) -> str:
    """An option's value as tables and pictures have it.

    >>> value_text(0.30000000000000004), value_text(None), value_text(()), value_text((0, 90)), value_text(False)
    ('0.3', 'none', 'none', '0 90', 'no')
    """
    if isinstance(value, list | tuple):
        return " ".join(map(value_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def setting_in_words(key: str, value: Any) -> str:
    """A setting as a label has it.

    >>> setting_in_words("method_options.beta", 0.5), setting_in_words("rounds", 150)
    ('beta 0.5', '150 rounds')
    >>> setting_in_words("churn", [[4, [7], []], [9, [8], [7]]])
    '2 joins, 1 leave'
    >>> setting_in_words("churn", [{"round": 4, "join": [7], "leave": []}])
    '1 join, 0 leaves'
    """
    name = key.rpartition(".")[2].replace("_", " ")
    if value is None:
        return f"no {name}"
    if name == "churn":  # by place in a configuration, by name in an identity
        changes = [Churn(**change) if isinstance(change, Mapping) else Churn(*change) for change in value]
        joins, leaves = sum(len(change.join) for change in changes), sum(len(change.leave) for change in changes)
        return f"{counted(joins, 'join')}, {counted(leaves, 'leave')}"
    text = value.replace("_", "-") if isinstance(value, str) else json.dumps(value)
    return f"{text} {name}" if name in COUNTED else f"{name} {text}"
