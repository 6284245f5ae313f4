"""Calls of the zbpp command."""

import signal
import subprocess
import sys
from contextlib import contextmanager

PATIENCE_S = 200
"""For a process that ends within seconds on an idle machine."""
TINY_LLAMA = ["--size", "tiny", "--seq", "16"]
"""Sizes of the model of `zbpp train` and `zbpp profile`."""


def run(*arguments, cwd=None):
    """Run a real process, as a shell would."""
    command = [sys.executable, "-m", "zbpp", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=cwd
    )


@contextmanager
def playground():
    """Run ``zbpp playground`` as long as the context lasts; gives its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "zbpp", "playground"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    with process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
        assert "interrupted" in process.stderr.read()
        assert process.wait(PATIENCE_S) == 130


def heed_ctrl_c() -> None:
    """A process that a shell's background has started would inherit a deaf ear."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
