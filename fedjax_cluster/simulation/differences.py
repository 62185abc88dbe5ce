"""In what two runs differ, by what their directories keep of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedjax_cluster.algorithms.method import LEFT_OUT
from fedjax_cluster.files import plain

GIVEN = ("fault", "random_numbers", "metrics")  # of an identity, which leaves them out where they are as always


def of_version_0_1(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity of version 0.1 in today's words; options that it left open or changed itself are left out."""
    renamed = {{"membership": "churn"}.get(name, name): value for name, value in identity.items()}
    options = {name: value for name, value in identity.get("algorithm_config", {}).items() if value is not None}
    if "proximal" in options and isinstance(options.get("local"), dict):
        options["local"] = {name: value for name, value in options["local"].items() if name != "proximal"}
    return {**renamed, "algorithm_config": options}


def differences(known: dict[str, Any], wanted: dict[str, Any], *, whole: bool = True) -> list[str]:
    """What is otherwise there than here; unless `whole`, what an older version did not keep cannot be compared."""
    programs = [part.get("programs", {}).get("jax") for part in (known, wanted)]
    if None not in programs and programs[0] != programs[1]:
        return [
            f"parts of it are known by their compiled programs alone, and these were made by JAX {programs[0]}, "
            f"while this is {programs[1]}"
        ]
    return list(_differences(known, {"churn": [], **wanted}, whole=whole))


def _differences(
    known: Mapping[str, Any], wanted: Mapping[str, Any], inside: str = "", *, whole: bool
) -> Iterator[str]:
    """What is otherwise there than here; below a method's name only where the names are the same."""
    # Unless all was kept, only these of what is here alone: they are left out where nothing was given.
    names = [*known, *(name for name in wanted if name not in known and (whole or name in (*LEFT_OUT, *GIVEN)))]
    for name in names:
        if name == "algorithm_config" and known["algorithm"] != wanted.get("algorithm"):
            continue
        old, new = (part.get(name, LEFT_OUT.get(name)) for part in (known, wanted))
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, "" if name == "algorithm_config" else f"{inside}{name}.", whole=whole)
        elif (name, old) == ("learning_rate", "optax") and isinstance(new, dict):
            continue  # of a named optimiser, whose name and numbers were not kept
        elif name == "programs" and old != new:
            yield f"some of it is code of one's own {'here' if old is None else 'there'} alone"
        elif old != new and inside == "programs.":
            yield f"{name} is another program"
        elif old != new:
            yield f"{inside}{name} is {old} there and {new} here"


def setting_differences(known: dict[str, Any] | None, wanted: Mapping[str, Any] | None) -> list[str]:
    """What an algorithm does not tell, such as the server's rate and the model; a run may only get longer."""
    if not known or not wanted:
        return []
    return [
        f"{key} is {known[key]} there and {value} here"
        for key, value in plain(dict(wanted)).items()
        if key != "rounds" and key in known and known[key] != value
    ]
