"""The page in a headless Chromium: hovers, zoom, switches, and no console error."""

import random
from dataclasses import replace

import pytest
from chromium import Chromium, executable

from zbpp.core import Costs, MemoryModel, Pass, PassKind, Slot, parse_job
from zbpp.planning import plan
from zbpp.schedules import add_collectives
from zbpp.simulator import makespan, memory_over_time, messages, simulate, step_time
from zbpp.simulator.page import PageEntry, write_page
from zbpp.simulator.palette import COLOURS, shade

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(executable() is None, reason="no Chromium is installed"),
]
COSTS = Costs(18.522, 18.086, 9.337, 0.601, 3.3)
MEMORY = MemoryModel(m_fixed=2, limit=12)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


def entry_of(mode, p, m, **more):
    schedule = plan(mode, n_stages=p, n_microbatches=m, effort="fast")
    timeline = simulate(schedule, COSTS)
    given = {"costs": COSTS, "memory": MEMORY} | more
    return PageEntry(name=mode, schedule=schedule, simulated=timeline, **given)


def measured(timeline):
    """A run that began at another time and took a little longer."""
    rows = tuple(
        tuple(Slot(s.job, 9e4 + 1.02 * s.start, 9e4 + 1.02 * s.end) for s in row)
        for row in timeline.rows
    )
    return replace(timeline, rows=rows)


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """A page of three timelines, two of them of one entry; and what it shows."""
    path = tmp_path_factory.mktemp("page") / "x.html"
    first = entry_of("ZBH1", 4, 8)
    first = replace(first, measured=measured(first.simulated))
    entries = [first, entry_of("ZBV", 4, 8)]
    write_page(entries, path, time_unit="ms", command="zbpp plot")
    browser.errors.clear()
    browser.requests.clear()
    browser.resize(1280, 1400)
    browser.open(path)
    return [first.simulated, first.measured, entries[1].simulated]


@pytest.fixture(autouse=True)
def quiet(browser):
    """No test may leave an error in the console, or have asked for another file."""
    yield
    assert browser.errors == []
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)


def point(browser, panel, stage, time):
    """The place on the screen of a stage at a time, counted from the panel's start."""
    return browser.run(f"""(() => {{
        const panel = panels[{panel}], box = panel.box.getBoundingClientRect();
        const x = panel.scale.x(panel.timeline.origin + {time!r});
        const y = laneTop(panel.scale, {stage}) + panel.scale.bar / 2;
        return [box.left + x, box.top + y];
    }})()""")


def told(browser):
    """The text about the job under the pointer, None if there is none."""
    return browser.run("""(() => {
        const tip = byId("tip");
        if (tip.hidden) return null;
        const rows = [...tip.querySelectorAll("tr")];
        const texts = rows.map((row) => [...row.children].map((c) => c.textContent));
        const job = tip.querySelector("strong").textContent;
        return { job, ...Object.fromEntries(texts) };
    })()""")


def expected(timeline, stage, slot, memory):
    """The same from the timeline, as Python knows it."""
    origin = min(s.start for row in timeline.rows for s in row)
    held = dict(memory_over_time(timeline, memory)[stage])
    found = {"stage": str(stage), "job": str(slot.job)}
    if isinstance(slot.job, Pass):
        found |= {"chunk": str(slot.job.chunk), "micro-batch": str(slot.job.microbatch)}
    times = {"start": slot.start - origin, "end": slot.end - origin}
    return found, times | {"lasts": slot.duration}, held


def hover(browser, timelines, rng):
    """Hover over a random job; the text about it, and what it ought to be."""
    panel = rng.randrange(len(timelines))
    timeline = timelines[panel]
    stage = rng.randrange(len(timeline.rows))
    slot = rng.choice(timeline.rows[stage])
    origin = min(s.start for row in timeline.rows for s in row)
    x, y = point(browser, panel, stage, (slot.start + slot.end) / 2 - origin)
    browser.mouse("mouseMoved", x, y)
    return told(browser), expected(timeline, stage, slot, MEMORY)


def differences(text, wanted):
    """Names of the rows of a text that differ from what they ought to be."""
    names, times, held = wanted
    if text is None:
        return ["nothing"]
    own = text | {"job": text["job"].split()[0]}
    wrong = [name for name, value in names.items() if own.get(name) != value]
    wrong += [
        name
        for name, time in times.items()
        if text[name] != f"{float(f'{time:.6g}'):.15g} ms"
    ]
    after = float(text["memory after"].split()[0])
    most = max(held.values()) + 1e-9
    return wrong + ([] if 2 <= after <= most else ["memory after"])


@pytest.mark.slow
def test_100_random_hovers_equal_the_timelines(browser, opened):
    rng = random.Random(0)
    for _ in range(100):
        text, wanted = hover(browser, opened, rng)
        assert differences(text, wanted) == [], (text, wanted)
    names, times, held = wanted
    assert differences(text, (names | {"stage": "9"}, times, held)) == ["stage"]
    later = times | {"end": times["end"] * 1.0001}
    assert differences(text, (names, later, held)) == ["end"]


def test_a_job_tells_whose_message_it_awaits(browser, opened):
    timeline = opened[2]
    for one in list(messages(timeline))[:5]:
        (stage, index), (source_stage, source) = one.target, one.source
        slot = timeline.rows[stage][index]
        x, y = point(browser, 2, stage, (slot.start + slot.end) / 2)
        browser.mouse("mouseMoved", x, y)
        sender = timeline.rows[source_stage][source].job
        assert told(browser)["message of"].startswith(f"{sender}, stage {source_stage}")


def test_wheel_keys_and_buttons_zoom_and_pan(browser, opened):
    whole = max(step_time(timeline) for timeline in opened)
    window = "[view.from, view.to]"
    assert browser.run(window) == [0, pytest.approx(whole)]
    x, y = point(browser, 0, 1, 100.0)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240, modifiers=2)
    low, high = browser.run(window)
    assert low < 100 < high < whole * 0.9
    assert point(browser, 0, 1, 100.0)[0] == pytest.approx(x, abs=whole)
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


SEEN = """
const seen = (canvas, x = 0, y = 0, width = canvas.width, height = canvas.height) => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height);
    const ctx = copy.getContext("2d", { willReadFrequently: true });
    ctx.drawImage(canvas, 0, 0);
    return ctx.getImageData(x, y, width, height);
};"""
"""Pixels of a canvas."""


def pixels(browser):
    """Hash of what the first panel shows."""
    return browser.run(
        f"(() => {{ {SEEN}"
        + """
        drawAll();
        const { canvas } = panels[0];
        const { data } = seen(canvas);
        let hash = 7;
        for (const byte of data) hash = (hash * 31 + byte) | 0;
        return hash;
    })()"""
    )


@pytest.mark.parametrize("switch", ["path", "messages", "memory"])
def test_switches_change_what_is_drawn_and_back(browser, opened, switch):
    before = pixels(browser)
    click = f"document.querySelector('[data-show={switch}]').click()"
    browser.run(click)
    assert pixels(browser) != before
    browser.run(click)
    assert pixels(browser) == before


def test_entries_are_hidden_and_shown(browser, opened):
    click = "document.querySelector('[data-entry=\"0\"]').click()"
    browser.run(click)
    assert browser.run("view.full") == pytest.approx(step_time(opened[2]))
    assert browser.run("panels.map((one) => one.section.hidden)") == [True, True, False]
    browser.run(click)
    assert browser.run("panels.some((one) => one.section.hidden)") is False


def colour_at(browser, panel, stage, time):
    return browser.run(f"""(() => {{ {SEEN}
        const panel = panels[{panel}];
        const x = panel.scale.x(panel.timeline.origin + {time!r});
        const y = laneTop(panel.scale, {stage}) + 2;
        return [...seen(panel.canvas, x * look.ratio, y * look.ratio, 1, 1).data];
    }})()""")


def test_jobs_are_drawn_in_their_colours_and_idle_is_not(browser, opened):
    tints = (COLOURS["F"], COLOURS["B"], shade(COLOURS["F"], 1))
    blue, orange, light = ([*bytes.fromhex(tint[1:])] for tint in tints)
    first = opened[0].rows[0][0]
    assert colour_at(browser, 0, 0, first.end / 2)[:3] == blue
    (own,) = (s for s in opened[0].rows[3] if str(s.job) == "3B0")
    assert colour_at(browser, 0, 3, (own.start + own.end) / 2)[:3] == orange
    (own,) = (s for s in opened[2].rows[0] if str(s.job) == "7F0")
    assert colour_at(browser, 2, 0, (own.start + own.end) / 2)[:3] == light
    (own,) = (s for s in opened[0].rows[0] if str(s.job) == "0B0")
    assert colour_at(browser, 0, 0, own.start - 5)[:3] not in (blue, orange, light)


def test_bands_show_shares_where_jobs_are_thin(browser, tmp_path):
    """In the warm-up all is F; once everything runs, a third is."""
    one = entry_of("ZBH1", 16, 256)
    write_page([one], tmp_path / "x.html")
    browser.open(tmp_path / "x.html")
    note = browser.run("panels[0].note.textContent")
    assert note.startswith("bands")
    column = (
        f"((time) => {{ {SEEN}"
        + """
        const { scale, canvas } = panels[0], height = scale.bar * look.ratio;
        const x = scale.x(time) * look.ratio, y = laneTop(scale, 0) * look.ratio;
        const { data } = seen(canvas, x, y, 1, height);
        let blue = 0;
        for (let i = 0; i < data.length; i += 4)
            blue += data[i] === 0 && data[i + 2] === 178;
        return blue / height;
    })"""
    )
    assert browser.run(f"{column}({COSTS.f * 8})") == 1
    middle = browser.run(f"{column}({makespan(one.simulated) / 2})")
    share = COSTS.f / (COSTS.f + COSTS.b + COSTS.w)
    assert middle == pytest.approx(share, abs=0.1)
    browser.run("setView(0, 300); drawAll()")
    assert browser.run("panels[0].note.textContent") == ""


@pytest.mark.slow
def test_98304_bars_open_zoom_and_hover(browser, tmp_path):
    """Times are in `benchmarks/page.py`; here everything works, and nothing is off."""
    one = entry_of("ZBH1", 64, 512)
    kinds = {PassKind.F, PassKind.B, PassKind.W}
    bars = [s.job for row in one.simulated.rows for s in row if isinstance(s.job, Pass)]
    assert len(bars) == 98_304 and {job.kind for job in bars} == kinds
    write_page([one], tmp_path / "x.html", time_unit="ms")
    browser.open(tmp_path / "x.html")
    rng = random.Random(1)
    for _ in range(6):
        stage = rng.randrange(64)
        slot = rng.choice(one.simulated.rows[stage][:-1])
        middle = (slot.start + slot.end) / 2
        browser.run(f"setView({middle - 400!r}, {middle + 400!r}); drawAll()")
        browser.run(f"panels[0].box.scrollIntoView(); scrollBy(0, {11 * stage - 300})")
        browser.mouse("mouseMoved", *point(browser, 0, stage, middle))
        text = told(browser)
        assert parse_job(text["job"].split()[0], stage=stage) == slot.job
        assert differences(text, expected(one.simulated, stage, slot, MEMORY)) == []


def test_collectives_have_a_strip_below_their_stage(browser, tmp_path):
    schedule = add_collectives(plan("ZBV", n_stages=3, n_microbatches=4), shards=True)
    costs = Costs(2, 2, 2, all_gather=3, reduce_scatter=1)
    timeline = simulate(schedule, costs)
    write_page([PageEntry(name="ZBV", simulated=timeline)], tmp_path / "x.html")
    browser.open(tmp_path / "x.html")
    slot = timeline.collectives[1][0]
    time = (slot.start + slot.end) / 2
    x, y = point(browser, 0, 1, time)
    below = browser.run("panels[0].scale.bar / 2 + panels[0].scale.strip / 2 + 1")
    browser.mouse("mouseMoved", x, y + below)
    text = told(browser)
    assert (text["job"], text["stage"], text["lasts"]) == (str(slot.job), "1", "1.5")
    browser.mouse("mouseMoved", x, y)
    assert told(browser) is None  # the stage itself waits for it
