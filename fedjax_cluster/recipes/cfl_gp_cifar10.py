"""CFL-GP on CIFAR-10, F.7: features shared, last layers by cluster; its part of Tables 1 and 3, and Figs. 6 and 17."""

from __future__ import annotations

from fedjax_cluster.experiments.cells import changed, printed, shortened, varied
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import Figures, Kept, Study
from fedjax_cluster.recipes import figures
from fedjax_cluster.recipes.cfl_gp import FIRST_ROUND, WITH_FIRST_ROUND, table_with_madmo
from fedjax_cluster.recipes.cfl_gp_pictures import features_over_time
from fedjax_cluster.report.panels import feature_panels
from fedjax_cluster.report.paper_rows import PaperRow

# Profiles of the last layer's updates alone; the layers before it are averaged over all clients.
CFL_GP = {"every": 2, "profile_layers": ("output",), "shared_layers": ("!output",)}
CIFAR10 = RunConfig(
    method="cfl_gp",
    scenario="label_shift",
    dataset="cifar10",
    model="resnet18",
    clients=20,
    clusters=2,
    rounds=300,
    batch_size=100,
    averaging="models",
    local_epochs=1,
    optimizer="adam",
    learning_rate=0.01,
    eval_every=10,
)
# LeNet-5 keeps to one label at Adam's 0.01; with 1 050 training rows a client 40 clients share all images.
LIGHT = {"model": "lenet5", "learning_rate": 0.003, "examples_per_client": 1500}
READING = (
    "Half of the clients add 5 to their labels, modulo 10. One local epoch of Adam, b = 100, P = 2; CFL-GP's profiles "
    "are of the last layer, and CFL-GP and IFCA average all other layers over all clients. --full: ResNet-18, rate "
    "0.01; every day LeNet-5, rate 0.003 (at 0.01 it keeps to one label), 1 500 examples per client, of which 1 050 to "
    "train on."
)
TABLE_1 = table_with_madmo(
    "cfl-gp-cifar10",
    "CFL-GP, Tables 1 and 3, Fig. 17: CIFAR-10, half of the clients with shifted labels, against the number of clients",
    f"{READING} --full has 300 rounds and all images among 20, 40 or 80 clients; every day 40 rounds, 20 and 40. MADMO "
    "is CFL, with thresholds as parts of the norms (our defaults, as Adam's steps are longer than its public ones), "
    "split after five rounds at the earliest, into as many clusters as it wants.",
    CIFAR10,
    {
        "CFL-GP": {"method_options": CFL_GP},
        "IFCA": {"method": "ifca", "method_options": {"start": "random", "shared_layers": ("!output",)}},
        "MADMO": {"method": "cfl", "method_options": {"first_round": 5}},
        "Global": {"method": "fedavg", "method_options": {"weighting": "uniform"}},
    },
    varied("C", "clients", (20, 40, 80)),
    {
        # The rounds are Table 3's.
        "CFL-GP": printed(
            accuracy="73.93±0.50 72.16±0.33 70.49±0.35",
            adjusted_rand_index="1±0 1±0 1±0",
            first_round_of_ideal_agreement="3.00±1.41 3.40±1.74 5.30±2.78",
        ),
        "IFCA": printed(
            accuracy="73.97±0.37 72.15±0.33 70.32±0.32",
            adjusted_rand_index="1±0 1±0 1±0",
            first_round_of_ideal_agreement="2.95±0.50 3.75±0.62 4.60±0.49",
        ),
        "MADMO": printed(
            accuracy="68.42±2.14 65.56±2.36 52.53±7.44", adjusted_rand_index="0.27±0.27 0.14±0.17 0.00±0.00"
        ),
        "Global": printed(accuracy="70.75±1.10 65.59±2.91 52.48±8.15", adjusted_rand_index="0±0 0±0 0±0"),
    },
    metrics=WITH_FIRST_ROUND,
    tolerances=FIRST_ROUND,
    seeds=3,
    light=shortened(columns=("C=20", "C=40"), paper=True, rounds=40, **LIGHT),
    quick=shortened(rows=("CFL-GP", "Global"), columns=("C=20",), rounds=4, eval_every=4, examples_per_client=200),
    figure=lambda cells, outcomes: {
        "": figures.by_column("accuracy")(cells, outcomes),
        "ari": figures.by_column("adjusted_rand_index")(cells, outcomes),
    },
)
TIMES = (1, 5, 9, 13)


def _of_last_layer(seeds: int, quick: bool, kept: Kept) -> tuple[list[PaperRow], Figures]:
    config = changed(CIFAR10, clients=40, method_options=CFL_GP, **LIGHT)
    if quick:
        config = changed(config, clients=10, examples_per_client=200)
    # The text's ARI of 1 is from t = 5 on.
    printed_values = {("C=40", time): 1.0 for time in TIMES[1:]}
    rows, shown = features_over_time(config, {"C=40": {}}, TIMES, seeds, kept, printed_values)
    return rows, feature_panels([[shown["C=40", time] for time in TIMES]], ("y", "y + 5"))


FIG_6 = Study(
    name="cfl-gp-fig6",
    title="CFL-GP, Fig. 6: the clients' features of the last layer at t = 1, 5, 9 and 13, CIFAR-10 with shifted labels",
    reading=f"{READING} Shown are the two features, of the first seed. The paper has 80 clients and ResNet-18, and "
    "states an ARI of 1 from t = 5 on; its times are not given.",
    seeds=3,
    minutes=10.0,
    run=_of_last_layer,
)
