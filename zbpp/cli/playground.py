"""``zbpp playground``: the report of `zbpp compare` below sliders, on this machine."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qsl, urlsplit

from zbpp.cli.compare import Comparison, planned_rows
from zbpp.core import Costs, RequestError
from zbpp.planning import BASELINE, MODES, PlanRequest, make_plan
from zbpp.simulator.page import timelines_html
from zbpp.training.options import Switch

_MOST_PASSES = 2048  # stages x micro-batches
_FILES = {
    "/": ("zbpp.cli", "playground.html", "text/html"),
    "/page.css": ("zbpp.simulator", "page.css", "text/css"),
    "/page.js": ("zbpp.simulator", "page.js", "text/javascript"),
}


@dataclass(frozen=True, kw_only=True)
class Playground:
    """Serve a page to this machine alone: sliders, modes compared live, timelines."""

    port: int = 0
    """Of the page; 0: any free port."""
    open: Switch = False
    """Open the page in the default browser."""

    def run(self, words: Sequence[str]) -> None:
        """Print the address, and serve until Ctrl-C."""
        import webbrowser

        try:
            server = ThreadingHTTPServer(("127.0.0.1", self.port), _Handler)
        except (OSError, OverflowError) as error:
            text = f"--port {self.port} is not available: {error}"
            raise RequestError(text) from None
        with server:
            address = f"http://127.0.0.1:{server.server_port}/"
            print(address, flush=True)
            print("Ctrl-C ends it", file=sys.stderr, flush=True)
            if self.open:
                webbrowser.open(address)
            server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    """The files of the page, and the report for the settings in a query."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/report":
            try:
                self._reply(_report(dict(parse_qsl(url.query))), "text/html")
            except (KeyError, ValueError) as error:
                self.send_error(HTTPStatus.BAD_REQUEST, explain=str(error))
        elif url.path in _FILES:
            package, name, kind = _FILES[url.path]
            self._reply(files(package).joinpath(name).read_text("utf-8"), kind)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _reply(self, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print no line a request."""


def _report(settings: dict[str, str]) -> str:
    """Tables, charts and timelines of all modes, for the values of the sliders.

    Raises:
        KeyError, ValueError: a value is missing or wrong.
    """
    n_stages, n_microbatches = int(settings["stages"]), int(settings["microbatches"])
    if n_stages * n_microbatches > _MOST_PASSES:
        raise RequestError(f"{n_stages} x {n_microbatches} passes: too many for a page")
    f, b, w, comm = (float(settings[name]) for name in ("f", "b", "w", "comm"))
    limit = float(settings["memory_limit"]) or None
    costs = Costs(f=f, b=b, w=w, comm=comm, memory_limit=limit)
    request = PlanRequest(
        schedule=BASELINE, n_stages=n_stages, n_microbatches=n_microbatches, costs=costs
    )
    rows = planned_rows(MODES, lambda mode: make_plan(replace(request, schedule=mode)))
    comparison = Comparison("", rows)
    timelines, of_each = zip(*comparison.drawn(), strict=True)
    return "".join([*comparison.elements("Modes"), timelines_html(timelines, of_each)])
