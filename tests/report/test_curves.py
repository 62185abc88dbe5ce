import numpy as np
import pytest

from fedjax_cluster.report import curves, style
from fedjax_cluster.report.names import method_name


def lines(axes):
    """Label -> (x, y) of the lines that have a label."""
    shown = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    return {line.get_label(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in shown}


def legend_texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def band(axes, index=0):
    """x, lower and upper edge of a band."""
    vertices = axes.collections[index].get_paths()[0].vertices[:-1]
    x = np.unique(vertices[:, 0])
    edges = np.asarray([[vertices[vertices[:, 0] == at, 1].min(), vertices[vertices[:, 0] == at, 1].max()] for at in x])
    return x, edges[:, 0], edges[:, 1]


# -------------------------------------------------------------------------------------- learning curves


def test_curve_runs_through_the_evaluated_rounds_in_percent(make_history, check_layout):
    history = make_history(20)
    figure = curves.learning_curves({"cfl_gp": history})
    upper, lower = figure.axes
    x, y = lines(upper)["CFL-GP"]
    np.testing.assert_array_equal(x, [5, 10, 15, 20])
    np.testing.assert_allclose(y, 100 * history["accuracy"][[4, 9, 14, 19]])
    x, y = lines(lower)["CFL-GP"]
    np.testing.assert_array_equal(x, np.arange(1, 21))
    np.testing.assert_array_equal(y, history["adjusted_rand_index"])
    assert upper.get_ylabel() == "Test accuracy (%)"
    assert lower.get_ylabel() == "Adjusted Rand index"
    assert lower.get_xlabel() == "Communication round"
    assert upper.get_xlabel() == ""
    assert legend_texts(figure) == ["CFL-GP"]
    assert not upper.collections, "one seed has no band"
    low, high = lower.get_ylim()
    assert low < 0
    assert high > 1
    check_layout(figure)


def test_last_evaluation_off_the_grid_is_drawn(make_history):
    (x, _) = lines(curves.learning_curves({"ifca": make_history(22)}).axes[0])["IFCA"]
    np.testing.assert_array_equal(x, [5, 10, 15, 20, 22])


def test_several_methods_share_the_panels(make_history, check_layout):
    figure = curves.learning_curves({"cfl_gp": make_history(), "ifca": make_history(best=0.8), "β = 1": make_history()})
    assert legend_texts(figure) == ["CFL-GP", "IFCA", "β = 1"]
    for axes in figure.axes:
        drawn = axes.get_lines()
        assert len({line.get_color() for line in drawn}) == 3
        assert len({line.get_marker() for line in drawn}) == 3
        # The first method lies on top.
        assert drawn[0].get_zorder() > drawn[1].get_zorder() > drawn[2].get_zorder()
    check_layout(figure)


def test_seeds_become_their_mean_and_a_band_of_one_deviation(make_history):
    seeds = [make_history(20, best=best) for best in (0.7, 0.8, 0.9)]
    upper = curves.learning_curves({"ifca": seeds}).axes[0]
    values = 100 * np.stack([seed["accuracy"][[4, 9, 14, 19]] for seed in seeds])
    x, y = lines(upper)["IFCA"]
    np.testing.assert_array_equal(x, [5, 10, 15, 20])
    np.testing.assert_allclose(y, values.mean(0))
    x, low, high = band(upper)
    np.testing.assert_array_equal(x, [5, 10, 15, 20])
    np.testing.assert_allclose(low, values.mean(0) - values.std(0, ddof=1))
    np.testing.assert_allclose(high, values.mean(0) + values.std(0, ddof=1))
    assert legend_texts(upper.figure) == ["IFCA", "± sample std over 3 seeds"]


def test_band_of_the_ari_stays_at_most_one(make_history):
    figure = curves.learning_curves({"ifca": [make_history(agreement=end) for end in (1.0, 1.0, 0.4)]})
    _, low, high = band(figure.axes[1])
    deviation = np.std([1.0, 1.0, 0.4], ddof=1)
    assert 0.8 + deviation > 1
    np.testing.assert_allclose(high.max(), 1.0)
    np.testing.assert_allclose(low.max(), 0.8 - deviation)


def test_bands_of_the_ari_are_within_the_axis(make_history):
    history = make_history(agreement=0.1), make_history(agreement=0.1), make_history(agreement=-0.4)
    axes = curves.learning_curves({"ifca": make_history(), "cfl": history}).axes[1]
    assert axes.get_ylim()[0] < band(axes)[1].min() < -0.2
    assert axes.get_ylim()[0] > band(axes)[1].min() - 0.1


def test_seeds_of_different_length_are_compared_where_both_have_values(make_history):
    figure = curves.learning_curves({"ifca": [make_history(20, best=1.0), make_history(10, best=1.0)]})
    x, y = lines(figure.axes[0])["IFCA"]
    np.testing.assert_array_equal(x, [5, 10])
    np.testing.assert_allclose(y, [(25 + 50) / 2, (50 + 100) / 2])


def test_seed_without_values_is_left_out(make_history):
    empty = make_history(columns={"accuracy": np.full(20, np.nan)})
    figure = curves.learning_curves({"ifca": [make_history(best=0.9), empty]})
    x, y = lines(figure.axes[0])["IFCA (1 of 2 seeds)"]
    assert len(x) == 4
    np.testing.assert_allclose(y[-1], 90)


# ----------------------------------------------------------------------------------- runs not finite


@pytest.fixture
def diverging(make_history):
    """A run of 20 rounds that is finite in the first `good` rounds, and from round `again` on."""

    def make(good, again=20, **options):
        history = make_history(20, **options)
        for name in ("loss", "accuracy", "test_loss"):
            history[name] = np.where(np.arange(20) < good, history[name], np.nan)
            history[name][again:] = make_history(20)[name][again:]
        return history

    return make


def crosses(axes):
    return [tuple(line.get_xydata()[0]) for line in axes.get_lines() if line.get_marker() == "x"]


def test_the_curve_of_a_run_that_diverged_ends_there_with_a_cross(diverging, make_history, check_layout):
    figure = curves.learning_curves({"fedavg": diverging(12), "ifca": make_history()})
    upper, lower = figure.axes
    np.testing.assert_array_equal(lines(upper)["FedAvg"][0], [5, 10])
    assert crosses(upper) == [(10, pytest.approx(45.0))]
    assert crosses(lower) == [(12, 1.0)]
    assert legend_texts(figure) == ["FedAvg", "IFCA", "not finite afterwards"]
    check_layout(figure)
    # Not of a seed that is in no curve.
    assert not crosses(curves.learning_curves({"fedavg": [make_history(), diverging(0)]}).axes[0])


def test_figures_of_a_model_that_was_left_behind_are_not_drawn(diverging, make_history):
    """Such as of an evaluation before it was plain that the run had diverged."""
    history = {**diverging(12), "accuracy": make_history()["accuracy"]}
    history["accuracy"][-1] = np.nan
    np.testing.assert_array_equal(lines(curves.learning_curves({"fedavg": history}).axes[0])["FedAvg"][0], [5, 10])


def test_a_curve_goes_on_where_the_last_cohorts_sent_nothing(diverging, make_history):
    history = {**diverging(12), "accuracy": make_history()["accuracy"]}
    axes = curves.learning_curves({"fedavg": history}).axes[0]
    assert lines(axes)["FedAvg"][0][-1] == 20
    assert not crosses(axes)


def test_one_seed_that_diverged_ends_the_mean(diverging):
    figure = curves.learning_curves({"fedavg": [diverging(20), diverging(12), diverging(20)]})
    np.testing.assert_array_equal(lines(figure.axes[0])["FedAvg"][0], [5, 10])
    assert len(crosses(figure.axes[0])) == 1


@pytest.mark.parametrize(
    ("metric", "x"), [("loss", [*range(1, 6), 13.5, *range(14, 21)]), ("accuracy", [5, 14.5, 15, 20])]
)
def test_a_curve_is_broken_where_the_run_was_not_finite(diverging, metric, x):
    axes = curves.learning_curves({"fedavg": diverging(5, 13)}, metric).axes[0]
    drawn, y = lines(axes)["FedAvg"]
    np.testing.assert_array_equal(drawn, x)
    np.testing.assert_array_equal(np.isnan(y), drawn % 1 > 0)
    assert not crosses(axes)


def test_rounds_in_which_nobody_took_part_break_nothing(diverging):
    history = {**diverging(9, 11), "num_clients": np.zeros(20), "num_rejected": np.zeros(20)}
    assert not np.isnan(lines(curves.learning_curves({"ifca": history}, "loss").axes[0])["IFCA"][1]).any()


def test_a_run_that_was_never_finite_is_named_and_drawn_without_a_line(diverging, make_history, check_layout):
    lost = {**diverging(0), "adjusted_rand_index": np.full(20, np.nan)}
    alone = curves.learning_curves({"fedavg": lost})
    assert [text.get_text() for text in alone.axes[0].texts] == ["no finite value"]
    assert legend_texts(alone) == ["FedAvg (no finite value)"]
    check_layout(alone)
    beside = curves.learning_curves({"fedavg": lost, "ifca": make_history()})
    assert legend_texts(beside) == ["IFCA", "FedAvg (no finite value)"]
    check_layout(beside)


@pytest.mark.parametrize("column", [np.full(20, np.nan), None])
def test_no_ari_no_lower_panel(make_history, column, check_layout):
    history = make_history(columns={} if column is None else {"adjusted_rand_index": column})
    if column is None:
        del history["adjusted_rand_index"]
    figure = curves.learning_curves({"ifca": history})
    (axes,) = figure.axes
    assert axes.get_xlabel() == "Communication round"
    check_layout(figure)


def test_method_without_ari_is_missing_in_the_lower_panel_only(make_history):
    without = make_history(columns={"adjusted_rand_index": np.full(20, np.nan)})
    figure = curves.learning_curves({"ifca": make_history(), "local_only": without})
    assert list(lines(figure.axes[0])) == ["IFCA", "Local only"]
    assert list(lines(figure.axes[1])) == ["IFCA"]
    assert legend_texts(figure) == ["IFCA", "Local only"]


def test_negative_ari_is_within_the_limits(make_history):
    figure = curves.learning_curves({"ifca": make_history(agreement=-0.4)})
    assert figure.axes[1].get_ylim()[0] < -0.4


@pytest.mark.parametrize(
    ("missing", "label"), [(("accuracy",), "Test loss"), (("accuracy", "test_loss"), "Training loss")]
)
def test_loss_takes_the_place_of_an_accuracy_that_is_not_there(make_history, missing, label):
    history = make_history(columns={name: np.full(20, np.nan) for name in missing})
    figure = curves.learning_curves({"ifca": history})
    assert figure.axes[0].get_ylabel() == label


@pytest.mark.parametrize(
    ("metric", "label", "last"),
    [("loss", "Training loss", 1.05), ("num_clusters", "Clusters in use", 4), ("top_5", "Top 5", 0.5)],
)
def test_any_column_can_be_drawn(make_history, metric, label, last):
    figure = curves.learning_curves({"ifca": make_history(columns={"top_5": np.full(20, 0.5)})}, metric=metric)
    assert figure.axes[0].get_ylabel() == label
    np.testing.assert_allclose(lines(figure.axes[0])["IFCA"][1][-1], last)


def test_ari_as_the_metric_is_drawn_once(make_history):
    figure = curves.learning_curves({"ifca": make_history()}, metric="adjusted_rand_index")
    (axes,) = figure.axes
    assert axes.get_ylim()[1] > 1


def test_markers_are_sparse_and_staggered(make_history):
    figure = curves.learning_curves({"ifca": make_history(800), "cfl_gp": make_history(800)})
    first, second = (line.get_markevery() for line in figure.axes[1].get_lines())
    assert first[1] == second[1] == 100
    assert first[0] != second[0]


def test_one_round_is_a_single_point(make_history, check_layout):
    figure = curves.learning_curves({"ifca": make_history(1)})
    x, _ = lines(figure.axes[0])["IFCA"]
    np.testing.assert_array_equal(x, [1])
    figure.draw_without_rendering()
    low, high = figure.axes[-1].get_xlim()
    assert [tick for tick in figure.axes[-1].get_xticks() if low <= tick <= high] == [1]
    check_layout(figure)


def test_ten_methods_keep_their_legend_within_the_column(make_history, check_layout):
    names = ["cfl_gp", "cfl", "gradient_loss", "fedgwc", "flag", "fedavg", "ifca", "pacfl", "fesem", "fedem"]
    figure = curves.learning_curves({name: make_history() for name in names})
    assert sorted(legend_texts(figure)) == sorted(method_name(name) for name in names)
    assert figure.get_figwidth() == style.SINGLE
    check_layout(figure)


@pytest.mark.parametrize("label", ["costs $5 or $10", "gain $_$", "50 $"])
def test_a_dollar_in_a_name_begins_no_formula(label, make_history):
    figure = curves.learning_curves({label: make_history()})
    figure.draw_without_rendering()
    assert legend_texts(figure) == [label.replace("$", r"\$")]


def test_what_cannot_be_drawn_is_refused(make_history):
    with pytest.raises(ValueError, match="histories is empty"):
        curves.learning_curves({})
    with pytest.raises(ValueError, match="the history of ifca has no rounds"):
        curves.learning_curves({"ifca": []})
    with pytest.raises(ValueError, match="the history of ifca has no rounds"):
        curves.learning_curves({"ifca": {"round": np.zeros(0)}})
    with pytest.raises(ValueError, match="no history has a value of 'f1'; choose one of accuracy, adj"):
        curves.learning_curves({"ifca": make_history()}, metric="f1")
    with pytest.raises(ValueError, match="name a column"):
        curves.learning_curves({"ifca": {"round": np.arange(2.0), "perplexity": np.ones(2)}})
    odd = make_history(columns={"accuracy": np.where(np.arange(20) == 3, 0.5, np.nan)})
    with pytest.raises(ValueError, match="the seeds of ifca have 'accuracy' in no common round"):
        curves.learning_curves({"ifca": [make_history(), odd]})


# ------------------------------------------------------------------------------------------------- sweep


def test_sweep_draws_means_bands_and_the_papers_values(check_layout):
    series = {"cfl_gp": ([87.0, 87.2, 87.3], [0.2, 0.3, 0.1]), "ifca": ([80.0, np.nan, 84.0], None)}
    figure = curves.sweep(
        [8, 16, 32], series, "Number of clients", "Test accuracy (%)", log_x=True, paper={"ifca": [79.3, 82.8, np.nan]}
    )
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Number of clients", "Test accuracy (%)")
    np.testing.assert_array_equal(lines(axes)["CFL-GP"], ([8, 16, 32], [87.0, 87.2, 87.3]))
    np.testing.assert_array_equal(lines(axes)["IFCA"], ([8, 32], [80.0, 84.0]))
    (published,) = [line for line in axes.get_lines() if line.get_label() == "_paper"]
    np.testing.assert_array_equal(published.get_xydata(), [[8, 79.3], [16, 82.8]])
    assert published.get_markerfacecolor() == "white"
    assert published.get_color() == style.line_look(1)["color"]
    x, low, high = band(axes)
    np.testing.assert_array_equal(x, [8, 16, 32])
    np.testing.assert_allclose(high - low, [0.4, 0.6, 0.2])
    assert len(axes.collections) == 1
    assert sorted(legend_texts(figure)) == ["CFL-GP", "IFCA", "paper", "± standard deviation"]
    check_layout(figure)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "16", "32"]


def test_a_series_without_a_value_is_named(check_layout):
    figure = curves.sweep([1, 2], {"ifca": ([1.0, 2.0], None), "cfl": ([np.nan, np.nan], None)}, "x", "y")
    assert legend_texts(figure) == ["IFCA", "CFL (no finite value)"]
    check_layout(figure)


def test_bands_of_a_sweep_end_at_what_no_value_can_be_above():
    figure = curves.sweep([1, 2], {"a": ([0.8, 0.9], [0.3, 0.05])}, "κ", "ARI", highest=1.0)
    _, low, high = band(figure.axes[0])
    np.testing.assert_allclose(high, [1.0, 0.95])
    np.testing.assert_allclose(low, [0.5, 0.85])


def test_an_index_that_never_differs_has_its_whole_axis():
    ones = {"CFL-GP": ([1.0, 1.0, 1.0], [0.0, 0.0, 1e-8])}
    axes = curves.sweep([20, 40, 80], ones, x_label="clients", y_label="ARI", highest=1.0).axes[0]
    assert axes.get_ylim() == pytest.approx((-0.06, 1.06))
    fewer = {"CFL-GP": ([1.0, 0.9, 1.0], None)}
    assert curves.sweep([20, 40, 80], fewer, x_label="clients", y_label="ARI", highest=1.0).axes[0].get_ylim()[0] > 0.8


def test_sweep_over_powers_of_ten_keeps_their_labels(check_layout):
    figure = curves.sweep([1, 10, 100, 1e3, 1e5], {"a": ([1, 1, 1, 1, 0.3], None)}, "Ratio", "ARI", log_x=True)
    check_layout(figure)
    assert any("10^{5}" in label.get_text() for label in figure.axes[0].get_xticklabels())


@pytest.mark.parametrize("x", [[0.5], list(range(30)), [1, 2, 1000]])
def test_sweep_ticks_do_not_meet(x, check_layout):
    check_layout(curves.sweep(x, {"a": (np.ones(len(x)), None)}, "x", "y"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"series": {}}, "series is empty"),
        ({"series": {"a": ([1.0], None)}}, r"a has values of shape \(1,\), but x has 2"),
        ({"series": {"a": ([1.0, 2.0], [0.1])}}, r"a has values of shape \(1,\), but x has 2"),
        ({"series": {"a": ([np.nan, np.nan], None)}}, "no series has a finite value"),
        ({"x": [0, 1], "log_x": True}, "x holds 0, which a logarithmic axis cannot show"),
        ({"x": [np.nan, 1]}, "finite numbers"),
        ({"paper": {"b": [1, 2]}}, "paper names 'b', which is none of the series a"),
        ({"paper": {"a": [1]}}, "a of the paper has values of shape"),
    ],
)
def test_sweep_refuses_what_does_not_fit(change, message):
    given = {"x": [1, 2], "series": {"a": ([1.0, 2.0], None)}, "x_label": "x", "y_label": "y", **change}
    with pytest.raises(ValueError, match=message):
        curves.sweep(**given)


# ------------------------------------------------------------------------------------------ other curves


def test_each_column_has_a_panel_and_rounds_count_from_one(make_history, check_layout):
    history = make_history(columns={"purity": np.linspace(0.25, 1.0, 20)})
    figure = curves.curves({"ifca": history}, ["purity", "loss", "accuracy"], levels={"purity": 0.9})
    purity, loss, accuracy = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["Purity", "Training loss", "Test accuracy (%)"]
    np.testing.assert_array_equal(lines(purity)["IFCA"][0], np.arange(1, 21))
    np.testing.assert_allclose(lines(loss)["IFCA"][1], history["loss"])
    np.testing.assert_array_equal(lines(accuracy)["IFCA"][0], [5, 10, 15, 20])
    assert [line.get_ydata()[0] for line in purity.get_lines() if line.get_label() != "IFCA"] == [0.9]
    check_layout(figure)


def test_seeds_become_their_mean_and_a_band_within_what_is_possible(make_history):
    runs = [make_history(columns={"purity": np.full(20, value)}) for value in (0.7, 1.0)]
    figure = curves.curves({"a": runs, "b": runs}, ["purity"], log_rounds=True)
    (axes,) = figure.axes
    np.testing.assert_allclose(lines(axes)["a"][1], 0.85)
    _, low, high = band(axes)
    np.testing.assert_allclose(low, 0.85 - np.std([0.7, 1.0], ddof=1))
    np.testing.assert_allclose(high, 1.0)
    assert axes.get_xscale() == "log"
    assert axes.get_xticks().tolist() == [1, 2, 5, 10, 20]


@pytest.mark.parametrize(
    ("histories", "metrics", "message"),
    [
        (True, [], "metrics is empty"),
        (True, ["top_5"], "no history has a value of 'top_5'"),
        (False, ["loss"], "empty"),
    ],
)
def test_columns_that_cannot_be_drawn_are_refused(make_history, histories, metrics, message):
    with pytest.raises(ValueError, match=message):
        curves.curves({"ifca": make_history()} if histories else {}, metrics)


def test_quantities_over_rounds_of_their_own(check_layout):
    figure = curves.round_curves({"a": ([1, 2], [0.5, -0.5]), "b": ([2, 3], [0.1, 0.2])}, "Gap")
    (axes,) = figure.axes
    assert lines(axes)["a"][1].tolist() == [0.5, -0.5]
    assert lines(axes)["b"][0].tolist() == [2, 3]
    assert [line.get_ydata() for line in axes.lines if line.get_label().startswith("_")] == [[0, 0]]
    check_layout(figure)
    with pytest.raises(ValueError, match="no series"):
        curves.round_curves({}, "Gap")
