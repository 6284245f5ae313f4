"""llms.txt: every page of the site as one text file, in the order of the menu.

Where a page has the docstrings of a module or a name, the file has its public names,
each with its signature and the first lines of its docstring.
"""

import inspect
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

_texts: dict[str, str] = {}
"""Texts of the pages by their addresses, in the order of the menu."""
_OBJECT = re.compile(r"^::: ([\w.]+)\n(?:    .*\n)*", re.MULTILINE)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the order of the pages."""
    _texts.update({page.url: "" for page in nav.pages})
    return nav


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> None:
    """Keep the text of a page; of a notebook, its cells."""
    if page.file.src_uri.endswith(".ipynb"):
        markdown = "\n\n".join(map(_cell_text, json.loads(markdown)["cells"]))
    _texts[page.url] = _OBJECT.sub(lambda match: describe(match[1]), markdown + "\n")


def _cell_text(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"


def describe(name: str) -> str:
    """Describe a public name; of a module, all of its names."""
    thing = pkgutil.resolve_name(name)
    if not inspect.ismodule(thing):
        return _entry(name, thing)
    return "".join(_entry(inner, getattr(thing, inner)) for inner in thing.__all__)


def _entry(name: str, thing: object) -> str:
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return f"* `{name}`\n"
    first, *_ = (inspect.getdoc(thing) or "").split("\n\n")
    try:
        signature = str(inspect.signature(thing))
    except ValueError:  # a class that is made by no call, such as an enumeration
        signature = ""
    return f"* `{name}{signature}`: {' '.join(first.split())}\n"


def on_post_build(config: MkDocsConfig) -> None:
    """Write the file."""
    parts = [f"# {config.site_name}\n\n> {config.site_description}\n"]
    for url, text in _texts.items():
        parts.append(f"\n\n<!-- {url} -->\n\n{text.strip()}\n")
    path = Path(config.site_dir) / "llms.txt"
    path.write_text("".join(parts), encoding="utf-8")
