"""Times of the playground as the site serves it, whose planner is in the browser.

    python benchmarks/playground.py

Builds the page as `make playground` does (needs npm), serves it, and opens it in a
headless Chromium: time until the first plan and until all modes are planned, from the
start of the load, and each mode's own time as its table shows it.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from chromium import Chromium

ROOT = Path(__file__).parents[1]
MARKS = """new Promise((done) => (function look() {
    const marks = performance.getEntriesByType('mark');
    if (marks.some((mark) => mark.name === 'zbpp settled')) {
        done(marks.filter((mark) => mark.name.startsWith('zbpp planned'))
            .map((mark) => mark.startTime));
    } else setTimeout(look, 20);
})())"""
SECONDS = """Object.fromEntries([...answers].flatMap(
    ([mode, answer]) => answer.reason ? [] : [[mode, answer.seconds]]))"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Open the page some times, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        maker = ROOT / "docs" / "hooks" / "make_playground.py"
        subprocess.run([sys.executable, str(maker), str(site)], check=True)
        handler = partial(Quiet, directory=site)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        sizes = f"#stages={flags.stages}&microbatches={flags.microbatches}"
        firsts, alls = [], []
        own: dict[str, list[float]] = {}
        for run in range(flags.runs):
            browser = Chromium(Path(folder) / f"profile{run}")
            try:
                browser.go(address + sizes)
                planned = browser.run(MARKS)
                firsts.append(min(planned) / 1000)
                alls.append(max(planned) / 1000)
                for mode, seconds in browser.run(SECONDS).items():
                    own.setdefault(mode, []).append(seconds)
                assert not browser.errors, browser.errors
                others = {
                    url
                    for url in browser.requests
                    if not url.startswith((address, "data:", "blob:"))
                }
                assert not others, others
            finally:
                browser.close()
        server.shutdown()
    print(f"first plan after {_text(firsts)}; all {len(own)} modes after {_text(alls)}")
    for mode, times in own.items():
        print(f"{mode:12} {_text(times)}")


def _text(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} s ({min(times):.2f}-{max(times):.2f})"


if __name__ == "__main__":
    main()
