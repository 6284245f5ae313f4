"""The playground in a headless Chromium, with either planner."""

import json
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pytest
from chromium import Chromium, executable
from playground_settings import command_line, random_settings

from zbpp.cli import main
from zbpp.cli.playground.server import make_server
from zbpp.planning import MODES

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(executable() is None, reason="no Chromium is installed"),
]
SETTLED = """new Promise((done, fail) => (function look() {
    const { classList, textContent } = byId('status');
    if (classList.contains('error')) fail(new Error(textContent));
    else if (performance.getEntriesByName('zbpp settled').length) done();
    else setTimeout(look, 50);
})())"""
NUMBERS = count()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(autouse=True)
def quiet(browser):
    """No test may leave an error in the console, or have asked another host."""
    browser.errors.clear()
    browser.requests.clear()
    yield
    assert browser.errors == []
    assert browser.requests
    own = ("http://127.0.0.1:", "data:", "blob:")
    assert [url for url in browser.requests if not url.startswith(own)] == []


def served(server):
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def local():
    yield from served(make_server())


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The page as it stands on the site, whose planner is in the browser."""
    if shutil.which("npm") is None:
        pytest.skip("npm fetches Pyodide, and is not installed")
    pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        str(ROOT / "docs" / "hooks" / "make_playground.py"),
        str(folder),
    ]
    subprocess.run(command, check=True, timeout=200)
    handler = partial(Quiet, directory=folder)
    yield from served(ThreadingHTTPServer(("127.0.0.1", 0), handler))


def open_page(browser, address):
    path, _, words = address.partition("#")
    number = next(NUMBERS)  # a change behind # alone loads nothing
    browser.go(f"{path.partition('?')[0]}?{number}#{words}")
    browser.run(SETTLED)


def again(browser, action):
    """Do what asks for plans, and wait until they are there."""
    browser.run("performance.clearMarks('zbpp settled')")
    browser.run(action)
    browser.run(SETTLED)


def cell(browser, mode, column):
    return browser.run(
        f"document.querySelector('#mode-{mode}').children[{column}].textContent"
    )


BUBBLE = 2  # its column


def test_sliders_plan_again_and_the_link_carries_them(browser, local):
    open_page(browser, local + "#stages=4&microbatches=8&modes=1F1B,ZBV")
    assert cell(browser, "1F1B", BUBBLE) == "27.27 %"
    assert cell(browser, "ZBV", BUBBLE) == "0.00 %"
    assert browser.run("panels.map((one) => one.timeline.name)") == ["1F1B", "ZBV"]
    slide = "byId('w').value = 2; byId('w').dispatchEvent(new Event('input'))"
    again(browser, slide)
    assert cell(browser, "1F1B", BUBBLE) == "27.27 %"
    link = browser.run("location.href")
    assert "w=2&" in link
    seen = browser.run("byId('modes').textContent.replaceAll(/[0-9]+ ms/g, '')")
    open_page(browser, link)
    then = browser.run("byId('modes').textContent.replaceAll(/[0-9]+ ms/g, '')")
    assert then == seen
    assert browser.run("settings.w") == 2


def test_a_limit_leaves_out_what_does_not_fit(browser, local):
    open_page(browser, local + "#stages=4&microbatches=8&limit=2.5&modes=FThenB,VMin")
    assert cell(browser, "FThenB", BUBBLE) == "does not fit"
    assert browser.run("panels.map((one) => one.timeline.name)") == ["VMin"]
    names = browser.run("[...document.querySelectorAll('.name')].map(n => n.innerHTML)")
    assert "VMin" in names and "FThenB" not in names


def test_a_wrong_link_opens_what_is_there_at_first(browser, local):
    open_page(browser, local + "#stages=x&microbatches=1e9&speeds=0,a&modes=ZBW")
    found = browser.run("[settings.stages, settings.microbatches, settings.speeds[0]]")
    assert found == [8, 64, 0.25]


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_screen(browser, local, width):
    browser.resize(width, 900)
    open_page(browser, local + "#stages=16&microbatches=16&modes=ZBH1")
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)  # Pyodide takes 6 s of CPU to load
def test_plans_in_the_browser_are_those_of_the_command_line(browser, site, tmp_path):
    """There its loops are built for WebAssembly."""
    open_page(browser, site + "#stages=8&microbatches=32")
    n_planned = browser.run("[...answers.values()].filter((a) => !a.reason).length")
    assert n_planned == len(MODES), "all of them fit"
    n_files = 0
    for mode, settings in random_settings(50, seed=0):
        question = json.dumps({"do": "plan", "settings": settings, "modes": [mode]})
        found = browser.run(f"ask({question})")
        code = main(command_line(mode, settings, tmp_path))
        assert code == (2 if "reason" in found else 0), (mode, settings)
        if code == 0:
            n_files += 1
            plan = (tmp_path / "plan.json").read_text(encoding="utf-8")
            assert found["file"] == plan, (mode, settings)
    assert n_files >= 40  # planned in the browser: this server has files alone
