"""Pages in a browser: no error on its console, nothing wider than the screen, also on a phone."""

import re
import shutil
import subprocess

import pytest

from fedjax_cluster.report import pages, run_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
SUMMARY = {"algorithm": "cfl_gp", "scenario": "rotated", "dataset": "digits", "clients": 6, "rounds": 20, "seed": 0}
ALONE = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-extensions")


def opened(path, profile, width):
    """The page as the browser leaves it, and what it wrote on its console."""
    where = (f"--user-data-dir={profile}", f"--window-size={width},900", "--enable-logging=stderr", "--v=0")
    words = [str(CHROMIUM), "--headless", *ALONE, *where, "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.fixture(scope="module")
def make_page(tmp_path_factory):
    def make(run, name):
        folder = tmp_path_factory.mktemp(name)
        long = "a_value_that_nowhere_has_a_space_to_break_at_" * 4
        told = run_page.Told(SUMMARY, {"dataset": long}, {long: 1}, {"devices": long})
        return run_page.write_run_page(folder, run, pages.write_plots(folder, run), told)

    return make


def test_a_page_opens_without_an_error(make_result, make_page, tmp_path):
    shown, errors = opened(make_page(make_result(), "run"), tmp_path / "profile", 1200)
    assert "Who moved when" in shown
    assert not errors


@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_is_wider_than_the_screen(make_result, make_page, tmp_path, width):
    page = make_page(make_result(), f"wide{width}")
    # A script measures a copy, from which the policy that forbids it is taken away.
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
    measure = """<script>addEventListener("load", () => { const page = document.documentElement;
      parent.postMessage([page.scrollWidth, innerWidth,
        [...document.images].every(image => image.complete && image.naturalWidth > 0)], "*"); })</script></body>"""
    page.with_name("measured.html").write_text(text.replace("</body>", measure), encoding="utf-8")
    copy = page.with_name("frame.html")  # a window is at least 500 wide, a frame is not
    copy.write_text(
        f"""<body><script>onmessage = found => document.body.dataset.found = found.data</script>
        <iframe src="measured.html" style="width: {width}px; height: 900px; border: 0"></iframe></body>"""
    )
    shown, errors = opened(copy, tmp_path / "profile", 1300)
    found = re.search(r'data-found="(\d+),(\d+),(\w+)"', shown)
    assert not errors
    assert found, "the page was measured"
    assert int(found[2]) == width
    assert int(found[1]) <= width
    assert found[3] == "true", "every picture is one"
