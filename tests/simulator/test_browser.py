"""Pages of timelines and the playground, in one headless Chromium."""

import random
from dataclasses import replace

import pytest
from chromium import Chromium, executable
from commands import playground

from zbpp.core import Costs, Pass, Slot
from zbpp.planning import plan
from zbpp.schedules import add_collectives
from zbpp.simulator import (
    PageEntry,
    makespan,
    messages,
    simulate,
    step_time,
    write_page,
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(executable() is None, reason="no Chromium is installed"),
]
COSTS = Costs(18.522, 18.086, 9.337, 0.601, 3.3, m_fixed=2, memory_limit=12)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium):
    """A page leaves no error in the console, and asks no other host for anything."""
    chromium.errors.clear()
    chromium.requests.clear()
    chromium.resize(1280, 1400)
    yield chromium
    assert chromium.errors == []
    known = ("file:", "data:", "blob:", "http://127.0.0.1:")
    assert [url for url in chromium.requests if not url.startswith(known)] == []


# Pages of timelines.


def entry_of(mode, p, m):
    schedule = plan(mode, n_stages=p, n_microbatches=m, effort="fast")
    timeline = simulate(schedule, COSTS)
    return PageEntry(name=mode, simulated=timeline, costs=COSTS)


@pytest.fixture
def timelines(browser, tmp_path):
    """Open a page of three timelines, two of them of one entry."""
    first, second = entry_of("ZBH1", 4, 8), entry_of("ZBV", 4, 8)
    rows = tuple(
        tuple(Slot(s.job, 9e4 + 1.02 * s.start, 9e4 + 1.02 * s.end) for s in row)
        for row in first.simulated.rows
    )
    first = replace(first, measured=replace(first.simulated, rows=rows))
    write_page([first, second], tmp_path / "x.html", time_unit="ms")
    browser.open(tmp_path / "x.html")
    return [first.simulated, first.measured, second.simulated]


def point(browser, panel, line, time):
    """The place on the screen of a line at a time, counted from the panel's start."""
    return browser.run(f"""(() => {{
        if (view.frame) drawAll();  // else the scale is that of before
        const {{ box, scale, timeline }} = panels[{panel}];
        const [y, height] = extent(timeline, scale, {line});
        const {{ left, top }} = box.getBoundingClientRect();
        return [left + scale.x({time!r}), top + y + height / 2];
    }})()""")


def hover(browser, panel, line, time):
    """The text about the job at a place, None if there is none."""
    browser.mouse("mouseMoved", *point(browser, panel, line, time))
    text = browser.run("byId('tip').hidden ? '' : byId('tip').textContent")
    if not text:
        return None
    title, *rows = text.split("\n")
    return {"job": title.split("  ")[0]} | {row[:14].strip(): row[14:] for row in rows}


def check_hover(browser, panel, timeline, stage, index):
    """Compare the text about a job with the timeline, as Python knows it."""
    slot = timeline.rows[stage][index]
    origin = min(s.start for row in timeline.rows for s in row)
    text = hover(browser, panel, stage, (slot.start + slot.end) / 2 - origin)
    assert text is not None
    assert (text["job"], text["stage"]) == (str(slot.job), str(stage))
    if isinstance(slot.job, Pass):
        assert text["micro-batch"] == str(slot.job.microbatch)
    times = {"start": slot.start - origin, "end": slot.end - origin}
    for name, time in (times | {"lasts": slot.duration}).items():
        value, unit = text[name].split()
        assert (float(value), unit) == (pytest.approx(time, rel=2e-5), "ms")


def click(browser, x, y, *, drag=0.0):
    for kind, left in (("Pressed", 0.0), ("Moved", drag), ("Released", drag)):
        more = {"clickCount": 1} if kind != "Moved" else {}
        browser.mouse(f"mouse{kind}", x - left, y, button="left", **more)


def test_hovers_name_jobs_their_times_and_the_message_that_they_await(
    browser, timelines
):
    rng = random.Random(0)
    for _ in range(12):
        panel, stage = rng.randrange(3), rng.randrange(4)
        index = rng.randrange(len(timelines[panel].rows[stage]))
        check_hover(browser, panel, timelines[panel], stage, index)
    with pytest.raises(AssertionError):  # another timeline
        check_hover(browser, 0, timelines[2], 3, 8)
    for one in list(messages(timelines[2]))[:4]:
        (stage, index), (source_stage, source) = one.target, one.source
        slot = timelines[2].rows[stage][index]
        sender = timelines[2].rows[source_stage][source].job
        text = hover(browser, 2, stage, (slot.start + slot.end) / 2)
        assert text["message of"].startswith(f"{sender}, stage {source_stage}")


def test_a_page_zooms_pans_pins_and_hides(browser, timelines):
    whole = max(step_time(timeline) for timeline in timelines)
    window = "[view.from, view.to]"
    assert browser.run(window) == [0, pytest.approx(whole)]
    x, y = point(browser, 0, 1, 100.0)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240, modifiers=2)
    low, high = browser.run(window)
    assert low < 100 < high < whole * 0.9
    browser.run("new Promise(requestAnimationFrame)")
    assert point(browser, 0, 1, 100.0)[0] == pytest.approx(x, abs=1)
    click(browser, x, y, drag=50)
    assert browser.run(window)[0] > low
    browser.run("document.querySelector('[data-zoom=\"0\"]').click()")
    assert browser.run(window) == [0, pytest.approx(whole)]
    first = timelines[0].rows[0][0]
    for pinned in (first.job.microbatch, -1):
        click(browser, *point(browser, 0, 0, first.end / 2))
        assert browser.run("view.pinned") == pinned
    hidden = "panels.map((one) => one.section.hidden)"
    for expected in ([True, True, False], [False] * 3):
        browser.run("document.querySelector('[data-entry=\"0\"]').click()")
        assert browser.run(hidden) == expected


def test_switches_change_what_is_drawn_and_back(browser, timelines):
    drawn = "drawAll(); panels[0].canvas.toDataURL()"
    before = browser.run(drawn)
    for switch in ("path", "messages", "memory"):
        button = f"document.querySelector('[data-show={switch}]').click()"
        browser.run(button)
        assert browser.run(drawn) != before, switch
        browser.run(button)
        assert browser.run(drawn) == before, switch


def pixels(browser, panel, at):
    """Red, green, blue and opacity of a part of what a panel shows."""
    data = browser.run(f"""(() => {{
        drawAll();
        const {{ canvas, scale, timeline }} = panels[{panel}];
        const copy = new OffscreenCanvas(canvas.width, canvas.height);
        const ctx = copy.getContext("2d", {{ willReadFrequently: true }});
        ctx.drawImage(canvas, 0, 0);
        return [...ctx.getImageData({at}).data];
    }})()""")
    return [tuple(data[i : i + 4]) for i in range(0, len(data), 4)]


def test_bands_show_shares_where_jobs_are_thin(browser, tmp_path):
    """In the warm-up all is F; once everything runs, a third is."""
    one = entry_of("ZBH1", 16, 256)
    write_page([one], tmp_path / "x.html", time_unit="ms")
    browser.open(tmp_path / "x.html")
    assert browser.run("panels[0].note.textContent").startswith("bands")
    shares, middle = [], makespan(one.simulated) / 2
    for time in (COSTS.f * 5, middle):
        top = "extent(timeline, scale, 0)[0] * look.ratio"
        at = f"scale.x({time!r}) * look.ratio, {top}, 1, scale.bar * look.ratio"
        column = pixels(browser, 0, at)
        shares.append(column.count(column[0]) / len(column))
    assert shares == pytest.approx([1, COSTS.f / (COSTS.f + 27.423)], abs=0.1)
    browser.run("setView(0, 300); drawAll()")
    assert browser.run("panels[0].note.textContent") == ""
    check_hover(browser, 0, one.simulated, 3, 5)


def test_collectives_have_a_lane_below_their_stage(browser, tmp_path):
    schedule = add_collectives(plan("ZBV", n_stages=3, n_microbatches=4), shards=True)
    timeline = simulate(schedule, Costs(2, 2, 2, all_gather=3, reduce_scatter=1))
    write_page([PageEntry(name="ZBV", simulated=timeline)], tmp_path / "x.html")
    browser.open(tmp_path / "x.html")
    slot = timeline.collectives[1][0]
    time = (slot.start + slot.end) / 2
    text = hover(browser, 0, 3 + 1, time)
    assert (text["job"], text["stage"], text["lasts"]) == (str(slot.job), "1", "1.5")
    assert hover(browser, 0, 1, time) is None  # the stage itself waits for it


# The playground.

SETTLED = """new Promise((done, fail) => (function look() {
    const { classList, textContent } = byId('status');
    if (classList.contains('error')) fail(new Error(textContent));
    else if (performance.getEntriesByName('zbpp settled').length) done();
    else setTimeout(look, 50);
})())"""
PANELS = "panels.map((one) => one.timeline.name)"


def test_the_playground_plans_again_for_every_change(browser):
    with playground() as address:

        def open_page(words):
            browser.go("about:blank")  # a change behind # alone loads nothing
            browser.go(f"{address}#{words}")
            browser.run(SETTLED)

        def bubble(mode):
            row = f"document.querySelector('#mode-{mode}')"
            return browser.run(f"{row}.children[2].textContent")

        open_page("stages=4&microbatches=8&modes=1F1B,ZBV")
        assert (bubble("1F1B"), bubble("ZBV")) == ("27.27 %", "0.00 %")
        assert browser.run(PANELS) == ["1F1B", "ZBV"]
        browser.run("performance.clearMarks('zbpp settled')")
        browser.run("byId('w').value = 2; byId('w').dispatchEvent(new Event('input'))")
        browser.run(SETTLED)
        table = "byId('modes').textContent.replaceAll(/[0-9]+ ms/g, '')"
        shown, link = browser.run(table), browser.run("location.href")
        assert "w=2&" in link
        open_page(link.partition("#")[2])
        assert browser.run(table) == shown and browser.run("settings.w") == 2

        open_page("stages=4&microbatches=8&limit=2.5&modes=FThenB,VMin")
        assert bubble("FThenB") == "does not fit"
        assert browser.run(PANELS) == ["VMin"]

        open_page("stages=x&microbatches=1e9&speeds=0,a&modes=ZBW")  # a wrong link
        names = "settings.stages, settings.microbatches, settings.speeds[0]"
        assert browser.run(f"[{names}]") == [8, 64, 0.25]

        for width in (400, 1400):
            browser.resize(width, 900)
            open_page("stages=16&microbatches=16&modes=ZBH1")
            assert browser.run("document.documentElement.scrollWidth") <= width
