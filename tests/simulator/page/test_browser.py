"""The page in a headless Chromium: hovers, zoom, switches, and no console error."""

import random
from dataclasses import replace

import pytest
from chromium import Chromium, executable

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
from zbpp.simulator.boxes import Style
from zbpp.simulator.metrics import memory_by_job

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(executable() is None, reason="no Chromium is installed"),
]
COSTS = Costs(18.522, 18.086, 9.337, 0.601, 3.3, m_fixed=2, memory_limit=12)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


def entry_of(mode, p, m):
    schedule = plan(mode, n_stages=p, n_microbatches=m, effort="fast")
    timeline = simulate(schedule, COSTS)
    return PageEntry(name=mode, simulated=timeline, costs=COSTS)


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """A page of three timelines, two of them of one entry; and what it shows."""
    path = tmp_path_factory.mktemp("page") / "x.html"
    first, second = entry_of("ZBH1", 4, 8), entry_of("ZBV", 4, 8)
    rows = tuple(
        tuple(Slot(s.job, 9e4 + 1.02 * s.start, 9e4 + 1.02 * s.end) for s in row)
        for row in first.simulated.rows
    )
    first = replace(first, measured=replace(first.simulated, rows=rows))
    write_page([first, second], path, time_unit="ms", command="zbpp show")
    browser.errors.clear()
    browser.requests.clear()
    browser.resize(1280, 1400)
    browser.open(path)
    return [first.simulated, first.measured, second.simulated]


@pytest.fixture(autouse=True)
def quiet(browser):
    """No test may leave an error in the console, or have asked for another file."""
    yield
    assert browser.errors == []
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)


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
    middle = (slot.start + slot.end) / 2 - origin
    text = hover(browser, panel, stage, middle)
    assert text is not None
    assert (text["job"], text["stage"]) == (str(slot.job), str(stage))
    if isinstance(slot.job, Pass):
        assert text["micro-batch"] == str(slot.job.microbatch)
    times = {"start": slot.start - origin, "end": slot.end - origin}
    for name, time in (times | {"lasts": slot.duration}).items():
        value, unit = text[name].split()
        assert (float(value), unit) == (pytest.approx(time, rel=2e-5), "ms")
    after = memory_by_job(timeline, COSTS)[stage][index][1]
    assert float(text["memory after"].split()[0]) == pytest.approx(after)


def test_random_hovers_equal_the_timelines(browser, opened):
    rng = random.Random(0)
    for _ in range(20):
        panel = rng.randrange(3)
        stage = rng.randrange(4)
        index = rng.randrange(len(opened[panel].rows[stage]))
        check_hover(browser, panel, opened[panel], stage, index)
    with pytest.raises(AssertionError):  # the control: another timeline
        check_hover(browser, 0, opened[2], stage, index)


def test_a_job_tells_whose_message_it_awaits(browser, opened):
    timeline = opened[2]
    for one in list(messages(timeline))[:5]:
        (stage, index), (source_stage, source) = one.target, one.source
        slot = timeline.rows[stage][index]
        sender = timeline.rows[source_stage][source].job
        text = hover(browser, 2, stage, (slot.start + slot.end) / 2)
        assert text["message of"].startswith(f"{sender}, stage {source_stage}")


def test_wheel_keys_and_buttons_zoom_and_pan(browser, opened):
    whole = max(step_time(timeline) for timeline in opened)
    window = "[view.from, view.to]"
    assert browser.run(window) == [0, pytest.approx(whole)]
    x, y = point(browser, 0, 1, 100.0)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240, modifiers=2)
    low, high = browser.run(window)
    assert low < 100 < high < whole * 0.9
    browser.run("new Promise(requestAnimationFrame)")
    assert point(browser, 0, 1, 100.0)[0] == pytest.approx(x, abs=1)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 50, y, button="left")
    browser.mouse("mouseReleased", x - 50, y, button="left", clickCount=1)
    assert browser.run(window)[0] > low
    browser.run("document.querySelector('[data-zoom=\"0\"]').click()")
    assert browser.run(window) == [0, pytest.approx(whole)]


def test_a_click_pins_a_micro_batch(browser, opened):
    slot = opened[0].rows[0][0]
    x, y = point(browser, 0, 0, slot.end / 2)
    for pinned in (slot.job.microbatch, -1):
        for kind in ("mousePressed", "mouseReleased"):
            browser.mouse(kind, x, y, button="left", clickCount=1)
        assert browser.run("view.pinned") == pinned


def pixels(browser, panel, at):
    """Bytes of a part of what a panel shows."""
    return browser.run(f"""(() => {{
        drawAll();
        const {{ canvas, scale, timeline }} = panels[{panel}];
        const copy = new OffscreenCanvas(canvas.width, canvas.height);
        const ctx = copy.getContext("2d", {{ willReadFrequently: true }});
        ctx.drawImage(canvas, 0, 0);
        return [...ctx.getImageData({at}).data];
    }})()""")


@pytest.mark.parametrize("switch", ["path", "messages", "memory"])
def test_switches_change_what_is_drawn_and_back(browser, opened, switch):
    seen = "drawAll(); panels[0].canvas.toDataURL()"
    before = browser.run(seen)
    click = f"document.querySelector('[data-show={switch}]').click()"
    browser.run(click)
    assert browser.run(seen) != before
    browser.run(click)
    assert browser.run(seen) == before


def test_entries_are_hidden_and_shown(browser, opened):
    click = "document.querySelector('[data-entry=\"0\"]').click()"
    browser.run(click)
    assert browser.run("view.full") == pytest.approx(step_time(opened[2]))
    assert browser.run("panels.map((one) => one.section.hidden)") == [True, True, False]
    browser.run(click)
    assert browser.run("panels.some((one) => one.section.hidden)") is False


def colour_at(browser, panel, stage, time):
    at = f"scale.x({time!r}) * look.ratio"
    y = f"(extent(timeline, scale, {stage})[0] + 2) * look.ratio"
    return pixels(browser, panel, f"{at}, {y}, 1, 1")[:3]


def test_jobs_are_drawn_in_their_colours_and_idle_is_not(browser, opened):
    tints = Style("F").colour, Style("B").colour, Style("F", 1).colour
    blue, orange, light = ([*bytes.fromhex(tint[1:])] for tint in tints)
    for panel, stage, name, tint in (
        (0, 0, "0F0", blue),
        (0, 3, "3B0", orange),
        (2, 0, "7F0", light),
    ):
        (slot,) = (s for s in opened[panel].rows[stage] if str(s.job) == name)
        middle = (slot.start + slot.end) / 2
        assert colour_at(browser, panel, stage, middle) == tint
    (slot,) = (s for s in opened[0].rows[0] if str(s.job) == "0B0")
    assert colour_at(browser, 0, 0, slot.start - 5) not in (blue, orange, light)


def test_bands_show_shares_where_jobs_are_thin(browser, tmp_path):
    """In the warm-up all is F; once everything runs, a third is."""
    one = entry_of("ZBH1", 16, 256)
    write_page([one], tmp_path / "x.html", time_unit="ms")
    browser.open(tmp_path / "x.html")
    assert browser.run("panels[0].note.textContent").startswith("bands")
    middle = makespan(one.simulated) / 2
    for time, share in ((COSTS.f * 5, 1), (middle, COSTS.f / (COSTS.f + 27.423))):
        top = "extent(timeline, scale, 0)[0] * look.ratio"
        at = f"scale.x({time!r}) * look.ratio, {top}, 1, scale.bar * look.ratio"
        data = pixels(browser, 0, at)
        blue = [data[i] == 0 and data[i + 2] == 178 for i in range(0, len(data), 4)]
        assert sum(blue) / len(blue) == pytest.approx(share, abs=0.1)
    browser.run("setView(0, 300); drawAll()")
    assert browser.run("panels[0].note.textContent") == ""
    check_hover(browser, 0, one.simulated, 3, 5)


def test_collectives_have_a_lane_below_their_stage(browser, tmp_path):
    schedule = add_collectives(plan("ZBV", n_stages=3, n_microbatches=4), shards=True)
    costs = Costs(2, 2, 2, all_gather=3, reduce_scatter=1)
    timeline = simulate(schedule, costs)
    write_page([PageEntry(name="ZBV", simulated=timeline)], tmp_path / "x.html")
    browser.open(tmp_path / "x.html")
    slot = timeline.collectives[1][0]
    time = (slot.start + slot.end) / 2
    text = hover(browser, 0, 3 + 1, time)
    assert (text["job"], text["stage"], text["lasts"]) == (str(slot.job), "1", "1.5")
    assert hover(browser, 0, 1, time) is None  # the stage itself waits for it
