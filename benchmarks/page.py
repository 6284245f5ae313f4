"""Size of a page, its first paint, and a zoom frame, in a headless Chromium.

    python benchmarks/page.py --stages 64 --microbatches 512

Without a Chromium it tells the size, and the processor time of writing the page. A zoom
frame runs from the wheel event until the frame after the drawing has begun, so that the
pixels are there.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from chromium import Chromium, executable

from zbpp.core import Costs
from zbpp.planning import plan
from zbpp.simulator import simulate
from zbpp.simulator.page import PageEntry, write_page

FRAME = """(async (factor, share) => {
    const next = () => new Promise(requestAnimationFrame);
    await next();
    const start = performance.now();
    zoom(factor, share);
    await next();
    await next();
    return performance.now() - start;
})"""


def main() -> None:
    """Write the page, open it some times, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", default="ZBH1")
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    flags = parser.parse_args()
    schedule = plan(
        flags.mode,
        n_stages=flags.stages,
        n_microbatches=flags.microbatches,
        effort="fast",
    )
    costs = Costs(18.522, 18.086, 9.337, 0.601, 3.3)
    entry = PageEntry(
        name=flags.mode,
        schedule=schedule,
        simulated=simulate(schedule, costs),
        costs=costs,
    )
    jobs = sum(map(len, schedule.orders))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        began = time.process_time()
        write_page([entry], path, time_unit="ms")
        written = time.process_time() - began
        size = path.stat().st_size / 2**20
        print(f"{jobs} jobs: {size:.2f} MiB, written in {written:.2f} s")
        if executable() is None:
            print("no Chromium is installed", file=sys.stderr)
            sys.exit(2)
        paints, drawn, frames = [], [], []
        for run in range(flags.runs):
            browser = Chromium(Path(folder) / f"profile{run}")
            try:
                browser.open(path)
                browser.run("new Promise((done) => setTimeout(done, 500))")
                paints.append(_first(browser, "paint", "first-contentful-paint"))
                drawn.append(_first(browser, "mark", "zbpp drawn"))
                browser.run("byId('timelines').scrollIntoView()")
                steps = [(0.7, 0.3)] * 12 + [(1 / 0.7, 0.6)] * 12
                frames += [browser.run(f"{FRAME}({f}, {s})") for f, s in steps]
                assert not browser.errors, browser.errors
            finally:
                browser.close()
    for name, times in (("first paint", paints), ("timelines drawn", drawn)):
        print(f"{name}: {_text(times)}")
    print(f"zoom frame: {_text(frames)}")


def _first(browser: Chromium, kind: str, name: str) -> float:
    found = f"performance.getEntriesByType('{kind}')"
    start = browser.run(f"{found}.find((one) => one.name === '{name}').startTime")
    return float(start)


def _text(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.0f} ms ({low:.0f}-{high:.0f}), at most {max(times):.0f}"


if __name__ == "__main__":
    main()
