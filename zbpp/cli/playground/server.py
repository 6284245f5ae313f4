"""The playground on this machine: its page, and answers of this Python's planner."""

import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from typing import Any

from zbpp.cli.playground.answers import answer, overview

__all__ = ["make_server", "page_files"]

_MOST_BYTES = 100_000  # of a question
_PLACES = {
    "playground.css": "zbpp.cli.playground",
    "playground.js": "zbpp.cli.playground",
    "page.css": "zbpp.simulator",
    "page.js": "zbpp.simulator",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def page_files() -> dict[str, bytes]:
    """The files of the page by the name under which they are served."""
    page = files("zbpp.cli.playground").joinpath("playground.html").read_text("utf-8")
    contents = {"index.html": page.replace("MODES", overview()).encode()}
    for name, package in _PLACES.items():
        contents[name] = files(package).joinpath(name).read_bytes()
    return contents


def make_server(port: int = 0) -> ThreadingHTTPServer:
    """Make a server for this machine alone; port 0 takes one that is free.

    Raises:
        OSError: the port is taken.
    """
    pages, one_at_a_time = page_files(), Lock()

    class Handler(BaseHTTPRequestHandler):
        """GET of the page's files, POST of questions."""

        def do_GET(self) -> None:
            name = self.path.split("?")[0].removeprefix("/") or "index.html"
            if name not in pages:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self._reply(pages[name], _TYPES[name.rpartition(".")[2]])

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            if self.path != "/answer" or not 0 < length <= _MOST_BYTES:
                self.send_error(HTTPStatus.BAD_REQUEST)
                return
            question = self.rfile.read(length).decode()
            try:
                with one_at_a_time:
                    text = answer(question)
            except (KeyError, TypeError, ValueError) as error:
                self.send_error(HTTPStatus.BAD_REQUEST, json.dumps(str(error)))
                return
            self._reply(text.encode(), "application/json")

        def _reply(self, content: bytes, kind: str) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Stay quiet: the terminal has the address, and nothing else."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
