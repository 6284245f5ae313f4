"""The playground in a headless Chromium."""

import threading
from itertools import count

import pytest
from chromium import Chromium, executable

from zbpp.cli.playground.server import make_server

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


@pytest.fixture(scope="module")
def local():
    server = make_server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


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
