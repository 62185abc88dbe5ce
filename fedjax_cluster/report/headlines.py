"""A run in a sentence, and its main figures at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedjax_cluster.data.partition import count_groups
from fedjax_cluster.report.histories import ARI, FULL, agreement_text
from fedjax_cluster.report.judged_by import of_honest
from fedjax_cluster.report.names import counted, method_name
from fedjax_cluster.report.table import NOT_FINITE
from fedjax_cluster.report.tables import diverged, figure, of_clustered, quality, rounds_text


def title(summary: Mapping[str, Any]) -> str:
    """What a run is called: its method, scenario and data.

    >>> title({"algorithm": "cfl_gp", "scenario": "rotated", "dataset": "digits"})
    'CFL-GP on rotated digits'
    """
    scenario, data = (str(summary.get(name) or "") for name in ("scenario", "dataset"))
    data = "" if data == scenario else data
    where = " ".join(filter(None, (scenario.replace("_", " "), data))) or "unknown data"
    return f"{method_name(str(summary.get('algorithm', 'run')))} on {where}"


def lead(summary: Mapping[str, Any], group: Any | None) -> str:
    """A run in one sentence.

    Args:
      summary: what summary.json holds.
      group: i32[M], true groups of the clients, −1 where unknown; None where there are none.
    """
    clients, rounds = figure(summary, "clients"), figure(summary, "rounds")
    groups = count_groups(group)
    who = counted(clients, "client") if clients else "clients"
    who += f" in {counted(groups, 'true group')}" if groups > 1 else ""
    begin = f"{who}, {rounds_text(summary)}" if rounds else who
    if diverged(summary):
        since = figure(summary, "first_round_not_finite")
        return f"{begin}: the run diverged{'' if since is None else f' in round {since:.0f}'}, and has no result."
    return f"{begin}: {', '.join(filter(None, (_quality(summary), _clusters(summary))))}."


def warning(summary: Mapping[str, Any]) -> str:
    """What a reader must know before any figure; "" where there is nothing."""
    if diverged(summary):
        rejected = figure(summary, "num_rejected") or 0
        return (
            f"The run diverged: {counted(rejected, 'update')} that were not finite, or too large, were left out, and "
            "the models are those of the last good round. A lower learning rate, or scaled data, may help."
        )
    if figure(summary, "first_round_not_finite") is not None:
        return "Some clients' predictions are not finite, so there is no mean over the clients."
    if rejected := figure(summary, "num_rejected"):
        return f"{counted(rejected, 'update')} of clients were missing, not finite or too large, and left out."
    return ""


def main_figures(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What, how much and a remark, for what a reader looks for first."""
    shown = []
    accuracy, loss = quality(summary, "accuracy", 100), quality(summary, "test_loss")
    if diverged(summary):
        since = figure(summary, "first_round_not_finite")
        shown.append(("Training loss", NOT_FINITE, "" if since is None else f"since round {since:.0f}"))
    elif accuracy is not None:
        worst = figure(summary, "accuracy_worst_decile", 100)
        remark = "" if worst is None else f"worst tenth {worst:.1f} %"
        honest = _of_honest(summary, "accuracy", 100)
        remark = remark if honest is None else f"of the honest clients {honest:.1f} %"
        shown.append(("Test accuracy", f"{accuracy:.1f} %", remark))
    elif loss is not None:
        shown.append(("Test loss", f"{loss:.4g}", "mean over the clients"))
    clusters, agreement = figure(summary, "num_clusters"), figure(summary, "adjusted_rand_index")
    if clusters is not None:
        final = figure(summary, "first_round_of_final_clustering")
        steady = final is None or final <= 1 or clusters <= 1
        shown.append(("Clusters", f"{clusters:.0f}", "" if steady else f"unchanged after round {final:.0f}"))
    if agreement is not None and (clusters or 0) > 1:
        ideal = figure(summary, "first_round_of_ideal_agreement")
        remark = "adjusted Rand index" if ideal is None else f"adjusted Rand index; 1.00 first after round {ideal:.0f}"
        honest = _of_honest(summary, ARI)
        remark = remark if honest is None else f"adjusted Rand index; of the honest clients {honest:.2f}"
        shown.append(("Agreement with groups", agreement_text(agreement), remark + of_clustered(summary)))
    down, clients = figure(summary, "models_down"), figure(summary, "clients")
    if down is not None and clients:
        up = figure(summary, "models_up", 1 / clients) or 0.0
        shown.append(("Models per client", f"{down / clients:,.4g}", f"sent down; {up:,.4g} sent up"))
    seconds, compiling = figure(summary, "run_seconds"), figure(summary, "compile_seconds")
    if seconds is not None:
        shown.append(("Time", f"{seconds:,.1f} s", "" if compiling is None else f"and {compiling:,.1f} s compiling"))
    return shown


def _quality(summary: Mapping[str, Any]) -> str:
    accuracy, worst = (quality(summary, name, 100) for name in ("accuracy", "accuracy_worst_decile"))
    honest = _of_honest(summary, "accuracy", 100)
    if accuracy is not None:
        remark = "" if worst is None else f" ({worst:.1f} % in the worst tenth)"
        remark = remark if honest is None else f" ({honest:.1f} % of the honest clients)"
        return f"test accuracy {accuracy:.1f} %{remark}"
    loss = quality(summary, "test_loss")
    return "" if loss is None else f"test loss {loss:.4g}"


def _of_honest(summary: Mapping[str, Any], name: str, factor: float = 1.0) -> float | None:
    """A figure of the clients that are not faulty, where some are."""
    other = of_honest(name, [summary])
    return None if other == name else figure(summary, other, factor)


def _clusters(summary: Mapping[str, Any]) -> str:
    clusters, agreement = figure(summary, "num_clusters"), figure(summary, "adjusted_rand_index")
    if not clusters:
        return ""
    if clusters <= 1:
        missing = figure(summary, "num_unclustered")
        return f"one cluster, and {counted(missing, 'client')} in none" if missing else "all in one cluster"
    text, honest = counted(clusters, "cluster"), _of_honest(summary, ARI)
    if agreement is None:
        return text
    if honest is not None:
        return f"{text} (adjusted Rand index with the groups {agreement:.2f}, of the honest clients {honest:.2f})"
    first = figure(summary, "first_round_of_ideal_agreement")
    if agreement >= FULL:
        since = "" if first is None else f", first after round {first:.0f}"
        return f"{text} that agree with the groups{since}{of_clustered(summary)}"
    return f"{text} (adjusted Rand index with the groups {agreement_text(agreement)}{of_clustered(summary)})"
