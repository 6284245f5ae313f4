"""The page of the commands: what each of them prints for --help."""

import re
from contextlib import redirect_stdout
from io import StringIO

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from zbpp.cli import main

_INTRODUCTION = """\
# Commands

Each text below is what the command prints for `--help`. Flags may be written with
hyphens or underscores. The exit code is 0 when all is done, 2 when the request was
wrong or cannot be met (one line explains how to fix it), and 1 after a fault of
zbpp or of the machine.

"""


def help_of(*words: str) -> str:
    """Return what ``zbpp words --help`` prints."""
    printed = StringIO()
    with redirect_stdout(printed):
        code = main([*words, "--help"])
    assert code == 0, f"zbpp {' '.join(words)} --help ends with {code}"
    return printed.getvalue().rstrip()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    overview = help_of()
    names = re.findall(r"^│ (\w+) {2,}\w", overview, re.MULTILINE)
    assert names, "the overview names the commands in a box"
    parts = [_INTRODUCTION, f"```text\n{overview}\n```\n"]
    for name in names:
        parts.append(f"\n## zbpp {name}\n\n```text\n{help_of(name)}\n```\n")
    page = File.generated(config, "reference/commands.md", content="".join(parts))
    files.append(page)
    return files
