import subprocess
import sys
import warnings

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedjax_cluster.report import curves, fonts, style


def test_style_leaves_the_callers_settings_alone():
    with matplotlib.rc_context({"font.size": 23.0, "axes.grid": False, "lines.linewidth": 9.0}):
        before = dict(matplotlib.rcParams.copy())
        with style.style():
            assert matplotlib.rcParams["axes.grid"]
            assert matplotlib.rcParams["font.size"] == style.FONT_POINTS
        assert dict(matplotlib.rcParams.copy()) == before


def test_style_is_the_same_whatever_the_caller_has_set(make_history):
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 23.0}):
        figure = curves.learning_curves({"ifca": make_history()})
    axes = figure.axes[0]
    assert axes.get_facecolor() == (1, 1, 1, 1)
    assert axes.yaxis.label.get_fontsize() == 7.5


def test_style_is_restored_after_an_error():
    before = dict(matplotlib.rcParams.copy())
    with pytest.raises(RuntimeError), style.style():
        raise RuntimeError
    assert dict(matplotlib.rcParams.copy()) == before


def test_importing_and_drawing_needs_no_pyplot_and_changes_no_settings():
    program = """
import sys
import warnings
from fedjax_cluster import report
assert report.tables and "matplotlib" not in sys.modules, "submodules are loaded when first used"
import matplotlib
before = dict(matplotlib.rcParams.copy())
from fedjax_cluster.report import clusters, curves
curves.learning_curves({"ifca": {"round": [0, 1], "loss": [2.0, 1.0]}})
clusters.group_by_cluster([0, 1], [0, 1])
assert "matplotlib.pyplot" not in sys.modules
assert dict(matplotlib.rcParams.copy()) == before
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_figure_is_of_the_asked_size_and_lays_itself_out():
    figure = style.new_figure(3.35, 2.0)
    assert isinstance(figure, Figure)
    np.testing.assert_allclose(figure.get_size_inches(), (3.35, 2.0))
    assert figure.dpi >= 200
    assert figure.get_layout_engine().__class__.__name__ == "ConstrainedLayoutEngine"


def test_notebook_shows_the_figure_by_itself(make_history):
    formatters = pytest.importorskip("IPython.core.formatters")
    shown, _ = formatters.DisplayFormatter().format(curves.learning_curves({"ifca": make_history()}))
    assert shown["image/png"].startswith(b"\x89PNG")


def test_lines_differ_in_more_than_their_colour():
    looks = [style.line_look(index) for index in range(24)]
    for first in range(24):
        for second in range(first):
            same = [looks[first][key] == looks[second][key] for key in ("color", "marker", "linestyle")]
            assert sum(same) < 2, (first, second)


@pytest.mark.parametrize("count", [1, 8, 9, 30])
def test_categories_have_colours_of_their_own(count):
    colors = style.categorical_colors(count)
    assert len(set(colors)) == count


def test_palette_keeps_its_distances_without_colour_vision():
    """Simulated after Viénot, Brettel and Mollon (1999): no two of the palette fall together for a dichromat."""

    def to_linear(c):
        return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)

    rgb = np.asarray([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in style.COLORS])
    protanope = np.asarray([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
    deuteranope = np.asarray([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    for matrix in (np.eye(3), protanope, deuteranope):
        seen = np.clip(to_linear(rgb) @ matrix.T, 0, 1) ** (1 / 2.2)
        distance = np.linalg.norm(seen[:, None] - seen[None], axis=-1) + np.eye(len(seen)) * 9
        assert distance.min() > 0.14


def test_legend_reads_row_by_row_in_as_many_columns_as_fit(check_layout):
    names = ["one", "two", "three", "four with a longer name", "five", "six", "seven"]
    with style.style():
        figure = style.new_figure(style.SINGLE, 2.0)
        axes = figure.subplots()
        lines = [axes.plot([0, 1], [0, 1], label=name)[0] for name in names]
        style.legend_above(figure, lines, names)
    (legend,) = figure.legends
    columns = legend._ncols
    assert 1 < columns < len(names)
    check_layout(figure)
    renderer = figure.canvas.get_renderer()
    place = {text.get_text(): text.get_window_extent(renderer) for text in legend.get_texts()}
    assert sorted(names, key=lambda name: (-round(place[name].y1 / 9), place[name].x0)) == names
    assert figure.get_figheight() > 2.0


def test_no_labels_no_legend():
    figure = style.new_figure(style.SINGLE, 2.0)
    style.legend_above(figure, [], [])
    assert not figure.legends


def test_long_label_is_wrapped():
    assert style.wrapped("mini-batch of 64 examples", 12) == "mini-batch\nof 64\nexamples"
    assert style.wrapped("", 12) == ""


# -------------------------------------------------------------------------------------------------- save


def test_saved_picture_is_one_column_at_300_dpi(make_history, tmp_path):
    path = style.save(curves.learning_curves({"ifca": make_history()}), tmp_path / "new" / "folder" / "curves.png")
    assert path == tmp_path / "new" / "folder" / "curves.png"
    with Image.open(path) as image:
        assert image.width == int(3.35 * 300)
    assert [file.name for file in path.parent.iterdir()] == ["curves.png"]


def test_saved_picture_is_what_matplotlib_saves(make_history, tmp_path):
    """One drawing in place of two; whoever shows the figure has it as it was."""
    ours, theirs = (curves.learning_curves({"ifca": make_history(), "fedavg": make_history()}) for _ in range(2))
    canvas, dpi = ours.canvas, ours.dpi
    with style.style():
        theirs.savefig(tmp_path / "theirs.png", dpi=style.FILE_DPI)
    path = style.save(ours, tmp_path / "ours.png")
    with Image.open(path) as one, Image.open(tmp_path / "theirs.png") as other:
        assert one.info["dpi"] == other.info["dpi"]
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert (ours.canvas, ours.dpi) == (canvas, dpi)


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_other_formats(make_history, tmp_path, ending, start):
    path = style.save(curves.learning_curves({"ifca": make_history()}), str(tmp_path / f"curves.{ending}"))
    assert path.read_bytes().startswith(start)


def test_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot write a figure to 'curves.bmp'; its name must end in .png"):
        style.save(style.new_figure(1, 1), tmp_path / "curves.bmp")


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    path.write_bytes(b"old")
    figure = style.new_figure(1, 1)

    def fail(self, target, **options):
        target.write_bytes(b"half")
        raise OSError("disk full")

    canvas, dpi = figure.canvas, figure.dpi
    monkeypatch.setattr(style.FigureCanvasAgg, "print_png", fail)
    with pytest.raises(OSError, match="disk full"):
        style.save(figure, path)
    assert (figure.canvas, figure.dpi) == (canvas, dpi)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_drawing_leaves_matplotlib_as_it_was(make_history, tmp_path):
    before = dict(matplotlib.rcParams.copy())
    style.save(curves.learning_curves({"ifca": make_history()}), tmp_path / "curves.png")
    assert dict(matplotlib.rcParams.copy()) == before


def test_characters_that_no_font_has_are_named_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(fonts, "_said", [])

    def saved(name):
        figure = style.new_figure(2, 1)
        figure.text(0.5, 0.5, "\U00100000 \U00100001")  # for private use: nobody's font has them
        style.save(figure, tmp_path / name)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved("one.png")
        saved("two.png")
    (line,) = caplog.messages
    assert line.startswith("no font of this machine has characters of the names in pictures, such as \U00100000, ")


def test_other_warnings_pass():
    with pytest.warns(DeprecationWarning, match="another"), fonts.missing_said_once():
        warnings.warn("another", DeprecationWarning, stacklevel=1)


def test_fonts_for_other_scripts_come_after_the_usual_one(monkeypatch):
    monkeypatch.setattr(fonts.fontManager, "get_font_names", lambda: ["SimHei", "Comic Sans MS", "Noto Sans CJK SC"])
    assert fonts.families() == ["sans-serif", "Noto Sans CJK SC", "SimHei"]


def test_fonts_of_a_pdf_are_true_type_however_it_is_saved(tmp_path, make_history):
    curves.learning_curves({"ifca": make_history()}).savefig(tmp_path / "a.pdf")
    content = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
