"""CFL-GP on wireless channels, F.6: a decoder by cluster, the encoder of all; Table 4, and Figs. 15 and 16."""

from __future__ import annotations

import numpy as np

from fedjax_cluster.experiments.cells import changed, headings, printed, shortened
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import Figures, Kept, Study
from fedjax_cluster.recipes import figures
from fedjax_cluster.recipes.cfl_gp import FIRST_ROUND, METHODS, table_with_madmo
from fedjax_cluster.recipes.cfl_gp_pictures import features_over_time
from fedjax_cluster.report.panels import feature_panels
from fedjax_cluster.report.paper_rows import PaperRow
from fedjax_cluster.simulation.result import SimulationResult

MATRICES = 100_000  # of all clients together, in --full
SHARED = {"shared_layers": ("encoder*",)}
CFL_GP = {"every": 2, **SHARED}
CHANNELS = RunConfig(
    method="cfl_gp",
    scenario="channels",
    model="csi_autoencoder",
    clients=10,
    clusters=5,
    rounds=1000,
    batch_size=200,
    averaging="models",
    local_epochs=1,
    optimizer="adam",
    learning_rate=0.002,
    eval_every=10,
    model_options={"latent": 16},
)
# A code of 4 numbers for 512 is the same compression.
LIGHT = {"scenario_options": {"size": 16}, "model_options": {"latent": 4}, "batch_size": 70, "examples_per_client": 300}
SHORT = {"rounds": 4, "eval_every": 4, "examples_per_client": 40}
READING = (
    "Five environments of 3GPP TR 38.901, ours drawn by its clustered delay lines where the paper has QuaDRiGa's "
    "(CD2); complex matrices are compressed 128 times. One local epoch of Adam, rate 0.002, P = 2; CFL-GP and IFCA "
    "average the encoder over all clients. --full: 32×32 matrices, 100 000 of them among the clients, b = 200; every "
    "day 16×16, 300 examples per client, b = 70."
)
COLUMNS = {f"CD2, C={count}": {"clients": count, "examples_per_client": MATRICES // count} for count in (10, 20, 40)}


def _decibel(result: SimulationResult) -> dict[str, float]:
    return {"nmse_decibel": float(10 * np.log10(result.summary["nmse"]))}


TABLE_4 = table_with_madmo(
    "cfl-gp-channels",
    "CFL-GP, Table 4 and Fig. 15: autoencoders of wireless channels, K = 5, against the number of clients",
    f"{READING} --full has 1 000 rounds with 10, 20 and 40 clients, every day 100 with 10. The paper's rate "
    "also falls by a cosine of 125 000 steps, of which a client of --full takes at most 35 000; ours is constant. "
    "MADMO is CFL with ε₁ 0.4, ε₂ 1.6, split after five rounds at the earliest, into as many clusters as it wants; its "
    "encoder is the cluster's. The paper shows the error of the reconstruction in a picture; its text says that the "
    "others' ARI stays below 0.55.",
    CHANNELS,
    {
        "CFL-GP": {"method_options": CFL_GP},
        "IFCA": {"method": "ifca", "method_options": {"start": "random", **SHARED}},
        "MADMO": METHODS["MADMO"],
        "Global": METHODS["Global"],
    },
    COLUMNS,
    {
        "CFL-GP": printed(
            adjusted_rand_index="1±0 1±0 1±0", first_round_of_ideal_agreement="120.33±8.38 195.00±46.68 267.00±12.96"
        )
    },
    metrics=headings(
        adjusted_rand_index="ARI", first_round_of_ideal_agreement="first round at ARI 1", nmse_decibel="NMSE (dB)"
    ),
    tolerances=FIRST_ROUND,
    seeds=3,
    measure=_decibel,
    light=shortened(columns=tuple(COLUMNS)[:1], paper=True, rounds=100, **LIGHT),
    quick=shortened(rows=("CFL-GP", "Global"), columns=tuple(COLUMNS)[:1], **{**LIGHT, **SHORT}),
    figure=lambda cells, outcomes: {
        "": figures.by_column("nmse")(cells, outcomes),
        "ari": figures.by_column("adjusted_rand_index")(cells, outcomes),
    },
)
TIMES = (1, 21, 41, 81)


def _while_learning(seeds: int, quick: bool, kept: Kept) -> tuple[list[PaperRow], Figures]:
    config, times = changed(CHANNELS, **LIGHT, method_options=CFL_GP), TIMES[:2] if quick else TIMES
    if quick:
        config = changed(config, **SHORT)
    rows, shown = features_over_time(config, {"C=10": {}}, times, seeds, kept, {("C=10", TIMES[-1]): 1.0})
    return rows, feature_panels([[shown["C=10", time] for time in times]], [f"CDL-{letter}" for letter in "ABCDE"])


FIG_16 = Study(
    name="cfl-gp-fig16",
    title="CFL-GP, Fig. 16: the clients' features while autoencoders of five kinds of channels learn",
    reading=f"{READING} Shown is the plane in which the five features vary most, of the first seed, with 10 clients; "
    "the paper has 40 and t = 1, 160, 320 and 480, and states an ARI of 1 at the last.",
    seeds=3,
    minutes=10.0,
    run=_while_learning,
)
