"""A page of `zbpp compare` to look at: made anew, so that it is as the code is."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from zbpp.cli import main


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        path = Path(folder) / "report.html"
        main(["compare", "--stages", "4", "--microbatches", "8", "--out", str(path)])
        text = path.read_text(encoding="utf-8").replace(str(path), path.name)
    files.append(File.generated(config, "start/example_report.html", content=text))
    return files
