"""``zbpp playground``: a page on which modes are compared live, on this machine."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from zbpp.core import RequestError
from zbpp.training.options import Switch

__all__ = ["Playground"]


@dataclass(frozen=True, kw_only=True)
class Playground:
    """Serve a page to this machine alone: sliders, modes compared live, timelines, plan
    files; needs no network.
    """

    port: int = 0
    """Of the page; 0: one that is free."""
    open: Switch = False
    """Open the page in the default browser."""

    def run(self, words: Sequence[str]) -> None:
        """Print the address, and serve until Ctrl-C."""
        import webbrowser  # with the server, it would hold up all other commands

        from zbpp.cli.playground.server import make_server

        try:
            server = make_server(self.port)
        except (OSError, OverflowError) as error:
            raise RequestError(f"--port {self.port} cannot be had: {error}") from None
        with server:
            address = f"http://127.0.0.1:{server.server_port}/"
            print(address, flush=True)
            print("Ctrl-C ends it", file=sys.stderr, flush=True)
            if self.open:
                webbrowser.open(address)
            server.serve_forever()
