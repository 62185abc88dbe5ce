"""Pages are whole, escaped and self-contained; what they say of a run and of a comparison."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_cluster.report import captions, comparison_page, headlines, pages, run_page, tables, timeline, web_page
from fedjax_cluster.types import UserFederation
from tests.pages import Page

EVIL = "<script>alert('&\"')</script>"
SUMMARY = {
    **{"algorithm": "cfl_gp", "scenario": "rotated", "dataset": "digits", "clients": 6, "rounds": 20, "seed": 0},
    **{"accuracy": 0.875, "accuracy_std": 0.06, "accuracy_worst_decile": 0.5, "test_loss": 0.5, "train_loss": 0.4},
    **{"adjusted_rand_index": 1.0, "num_clusters": 2, "num_rejected": 0, "first_round_of_ideal_agreement": 1},
    **{"first_round_of_final_clustering": 1, "models_down": 120.0, "models_up": 60.0, "run_seconds": 0.31},
}


def told(summary=SUMMARY, **others):
    return run_page.Told(summary, **{"settings": {}, "options": {}, "machine": {}, **others})


@pytest.fixture
def page_of(make_result, tmp_path):
    """A run's page, read back; the run's method, and what is told of it, can be given."""

    def make(given, method="cfl_gp", run=None, **options):
        run = make_result(method, **options) if run is None else run
        plots = pages.write_plots(tmp_path, run)
        run_page.write_run_page(tmp_path, run, plots, given)
        return Page(tmp_path / "report.html")

    return make


def test_a_page_tells_the_run(page_of, tmp_path):
    page = page_of(told(settings={"rounds": 20, "scenario_options": {"angles": [0, 90]}}, machine={"jax": "0.10"}))
    assert page.texts.count("CFL-GP on rotated digits") == 2, "title and heading"
    lead = "6 clients in 2 true groups, 20 rounds: test accuracy 87.5 % (50.0 % in the worst tenth), "
    # Client 5 has no examples: it is shown nowhere.
    assert "2 clusters that agree with the groups, first after round 2." in page.text
    assert lead in page.text
    assert {"summary", "rounds", "moves", "clients", "method", "configuration", "environment"} == page.anchors
    names = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert len(page.images) == len(names) == 7
    for name in names:
        assert any(alt.startswith(captions.caption(name).title) for alt in page.images), name
        assert f"plots/{name}.png" in page.links
    assert "scenario options: angles" in page.text
    assert "0, 90" in page.text
    # 120 models to 6 clients.
    assert page.texts[page.texts.index("models sent to clients") :][1:3] == ["120", "20.0"]


@pytest.mark.slow
def test_moves_are_listed_and_counted(page_of):
    page = page_of(told())
    assert "2 moves of 2 clients, the last in round 4." in page.text
    assert "1 → 0: 3, 4" in page.text
    rows = page.texts[page.texts.index("test examples") + 1 :]
    assert rows[:6] == ["0", "left", "1", "0", "3", "3"]
    assert rows[18:24] == ["3", "right", "0", "1", "3", "3"]


@pytest.mark.slow
def test_clients_that_stand_out_are_named_with_the_reasons(page_of):
    page = page_of(told(outliers={3: ["moved 5 times", "its update is <not> finite"], 4: ["copies"]}))
    row = page.texts.index("why") + 1
    assert page.texts[row : row + 6] == ["3", "0", "moved 5 times; its update is <not> finite", "4", "0", "copies"]
    assert "None: nobody moved, copies or learns much unlike the others." in page_of(told(outliers={})).text
    unknown = page_of(told(outliers={}, not_compared=("rows", "updates"))).text
    assert "None: nobody moved much unlike the others. Rows and updates were not compared." in unknown
    some = page_of(told(outliers={0: ["moved 5 times"]}, not_compared=("updates",))).text
    assert "Updates were not compared." in some
    assert "Each trained once" not in some
    assert "stand out" not in page_of(told()).text, "not looked at"


@pytest.mark.slow
def test_labels_of_clusters_are_shares_of_examples(page_of, make_result):
    run = make_result("ifca")
    run.federation = run.federation._replace(
        train=run.federation.train._replace(y=np.asarray([[0, 0, 1]] * 3 + [[1, 1, 1]] * 3, np.int32))
    )
    texts = page_of(told(), run=run).texts
    start = texts.index("examples", texts.index("Labels of each cluster"))
    assert texts[start + 1 :][:2] == ["0", "1"]
    assert texts[start + 3 :][:4] == ["0", "2", "6", "100"], "cluster 0: two clients with label 1 alone"
    assert texts[start + 7 :][:5] == ["1", "3", "9", "67", "33"]


@pytest.mark.slow
def test_what_a_user_gave_is_text(page_of, make_result):
    run = make_result("ifca")
    info = run.federation.info._replace(name=EVIL, group_names=(EVIL, "right"))
    run.federation = run.federation._replace(info=info)
    summary = {**SUMMARY, "algorithm": "ifca", "scenario": EVIL, "dataset": f"{EVIL}.npz"}
    hostile = {"settings": {EVIL: EVIL, "dataset": [EVIL]}, "options": {"a": {EVIL: 1}}, "machine": {EVIL: EVIL}}
    page = page_of(told(summary, **hostile), run=run)
    assert page.text.count("<script>") >= 8, "shown as it was given"


def test_a_label_and_a_reason_of_a_comparison_are_text(tmp_path, make_history):
    one = SimpleNamespace(label=EVIL, summaries=[{**SUMMARY, "seed": 0}], failed={1: EVIL}, histories=[make_history()])
    table = tables.comparison_table([one])
    known = comparison_page.Background({EVIL: {0: tmp_path / EVIL.replace("/", "")}}, {EVIL: {EVIL: EVIL}}, {})
    comparison_page.write_comparison_page(tmp_path, [one], table, [], known)
    assert Page(tmp_path / "report.html").text.count("<script>") >= 6


def test_a_history_alone_makes_a_page(make_history, tmp_path):
    plots = pages.write_plots(tmp_path, {"ifca": make_history()})
    run_page.write_run_page(tmp_path, None, plots, told({"algorithm": "ifca"}))
    page = Page(tmp_path / "report.html")
    assert "IFCA on unknown data" in page.text
    assert page.anchors == {"rounds"}


@pytest.mark.slow
def test_a_diverged_run_says_so_first(page_of):
    nothing = {"accuracy": None, "test_loss": None, "train_loss": float("nan"), "num_rejected": 9}
    page = page_of(told({**SUMMARY, **nothing, "first_round_not_finite": 6}))
    assert "the run diverged in round 7, and has no result." in page.text
    assert "The run diverged: 9 updates that were not finite" in page.text
    assert "87.5" not in page.text


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"accuracy": None, "test_loss": 0.25, "num_clusters": 1}, "test loss 0.25, all in one cluster."),
        ({"adjusted_rand_index": 0.444}, "2 clusters (adjusted Rand index with the groups 0.44)."),
        ({"adjusted_rand_index": None, "first_round_of_ideal_agreement": None}, "worst tenth), 2 clusters."),
    ],
)
def test_the_lead_tells_what_there_is(summary, expected):
    assert headlines.lead({**SUMMARY, **summary}, None).endswith(expected)


@pytest.mark.slow
def test_one_cluster_has_no_moves(page_of, make_result):
    run = make_result("ifca")
    run.assignments = (np.asarray([1, 20]), np.zeros((2, 6), int))
    assert "moves" not in page_of(told(), run=run).anchors


def test_a_page_is_whole_or_not_there(tmp_path, monkeypatch):
    def full(*given, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space"):
        web_page.write_page(tmp_path / "report.html", "a", "b", [])
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_picture_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="no PNG file"):
        web_page.picture(tmp_path / "a.png", "A.", "b")


def test_moves_are_changes_between_kept_rounds():
    found = timeline.moves([1, 3, 9], [[0, 1, -1], [0, 2, 0], [0, 2, 0]])
    assert [tuple(move) for move in found] == [(3, 1, 1, 2), (3, 2, -1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 6, 60, 300])
@pytest.mark.parametrize("rounds", [[1], [1, 2, 100], [1, 2000, 4000]])
def test_a_timeline_fits(clients, rounds, check_layout):
    rng = np.random.default_rng(clients)
    cluster = rng.integers(-1, 12 if clients > 50 else 3, (len(rounds), clients))
    group = np.sort(rng.integers(0, 3, clients))
    for given in (None, group):
        check_layout(timeline.cluster_timeline(rounds, cluster, given, ["a rather long name", "b"]))


def test_a_timeline_shows_each_round_in_its_place():
    figure = timeline.cluster_timeline([1, 3, 6], [[0, 0], [0, 1], [1, 1]])
    upper, lower = figure.axes
    mesh = lower.collections[0]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0.5, 2.5, 5.5, 6.5]
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in upper.patches]
    assert bars == [(3, 1), (6, 1)]
    colors = np.asarray(mesh.get_array())
    assert (colors[0, 0] == colors[0, 1]).all(), "client 0 stays until round 5"
    assert (colors[0, 1] != colors[0, 2]).any()
    assert (colors[1, 1] == colors[0, 2]).all(), "client 1 is in cluster 1 from round 3 on"


@pytest.mark.parametrize("group", [None, [0, 1, 1, 1]])
def test_users_are_named_beside_their_rows(group, check_layout):
    figure = timeline.cluster_timeline([1, 3], [[1, 0, 0, 1], [1, 0, 0, 0]], group, (), users=["d", "c", "b", "a"])
    rows = figure.axes[1].yaxis.get_ticklabels(minor=group is not None)
    assert [label.get_text() for label in rows] == (["c", "b", "a", "d"] if group is None else ["d", "c", "b", "a"])
    assert [label.get_position()[1] for label in rows] == [0, 1, 2, 3]
    check_layout(figure)
    many = timeline.cluster_timeline([1], [range(41)], users=range(41))
    assert not many.axes[1].get_yticklabels()


def test_the_timeline_of_a_run_names_its_users(make_result):
    run = make_result("ifca", group=None)
    run.federation = UserFederation.of(run.federation, np.asarray([f"user {at}" for at in range(6)]))
    rows = pages.round_figures(run)["cluster_timeline"].axes[1].get_yticklabels()
    assert [label.get_text() for label in rows] == ["user 3", "user 4", "user 0", "user 1", "user 2"]


@pytest.mark.parametrize(
    ("rounds", "cluster", "group"),
    [([1, 2], [[0]], None), ([2, 1], [[0], [1]], None), ([1], [[0, 1]], [0]), ([], np.zeros((0, 2)), None)],
)
def test_a_timeline_of_other_shapes_is_refused(rounds, cluster, group):
    with pytest.raises(ValueError, match=r"give \[E\]|ascend|clients"):
        timeline.cluster_timeline(rounds, cluster, group)


def test_the_lead_of_a_comparison_takes_the_tables_best_and_equals_share_it():
    def method(label, *accuracies):
        ended = tuple({"seed": seed, "accuracy": of} for seed, of in enumerate(accuracies) if of is not None)
        return SimpleNamespace(
            label=label, summaries=ended, failed={seed: "lost" for seed, of in enumerate(accuracies) if of is None}
        )

    few, best, other = method("few", 0.99, None), method("best", 0.5, 0.7), method("other", 0.7, 0.5)
    lead = comparison_page.lead
    assert lead([few, best]) == (
        "2 methods over 2 seeds: best with 60.0 ± 14.1 % has the highest mean test accuracy of those with the most "
        "seeds; few with 99.0 % (1 of 2) follows."
    )
    assert "best and other with 60.0 ± 14.1 % share the highest mean test accuracy of" in lead([best, few, other])
    assert lead([best, other]).endswith("share the highest mean test accuracy.")
    third, fourth = method("third", 0.4, 0.4), method("fourth", 0.4, 0.4)
    assert lead([third, best, fourth]).endswith("accuracy; third and fourth with 40.0 ± 0.0 % follow.")
