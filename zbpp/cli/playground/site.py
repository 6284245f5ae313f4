"""The files of the playground, by the name under which they are served."""

import json
import zipfile
from importlib.resources import files
from importlib.resources.abc import Traversable
from io import BytesIO
from pathlib import Path

from zbpp.cli.playground.answers import overview

__all__ = ["PYODIDE", "page_files", "write_site"]

PYODIDE = "314.0.7"
"""The version of the npm package that the page is tested with."""

_OF_PYODIDE = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
_PLACES = {
    "playground.css": "zbpp.cli.playground",
    "playground.js": "zbpp.cli.playground",
    "page.css": "zbpp.simulator.page",
    "timeline.js": "zbpp.simulator.page",
    "view.js": "zbpp.simulator.page",
}


def page_files(planner: str) -> dict[str, bytes]:
    """Read the page, whose planner is ``server`` or ``pyodide``."""
    page = files("zbpp.cli.playground").joinpath("playground.html").read_text("utf-8")
    settings = json.dumps({"planner": planner, "modes": json.loads(overview())})
    contents = {"index.html": page.replace("SETTINGS", settings).encode()}
    for name, package in _PLACES.items():
        contents[name] = files(package).joinpath(name).read_bytes()
    return contents


def write_site(out: Path, pyodide: Path, loops: Path) -> None:
    """Write a folder that any web server serves: page, planner and its Python.

    Args:
        out: the folder; what it holds under other names stays.
        pyodide: the unpacked npm package.
        loops: the planner's loops in C, built for WebAssembly.

    Raises:
        FileNotFoundError: ``loops``, or a file of the npm package, is missing.
    """
    worker = files("zbpp.cli.playground").joinpath("worker.js").read_bytes()
    contents = page_files("pyodide") | {
        "worker.js": worker,
        "zbpp.zip": _package(loops),
    }
    for name in _OF_PYODIDE:
        contents[f"pyodide/{name}"] = (pyodide / name).read_bytes()
    for name, content in contents.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)


def _package(loops: Path) -> bytes:
    """Pack every module, and the loops; always the same bytes for the same ones."""
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        _pack(files("zbpp"), "zbpp", archive)
        _add(archive, "zbpp/schedules/planner/compiled/loops.shared", loops)
    return packed.getvalue()


def _pack(folder: Traversable, name: str, archive: zipfile.ZipFile) -> None:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        inner = f"{name}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            _pack(entry, inner, archive)
        elif entry.name.endswith(".py"):
            _add(archive, inner, entry)


def _add(archive: zipfile.ZipFile, name: str, file: Traversable) -> None:
    about = zipfile.ZipInfo(name)  # without the time of the file
    archive.writestr(about, file.read_bytes(), zipfile.ZIP_DEFLATED)
