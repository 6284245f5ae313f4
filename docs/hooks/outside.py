"""Pages of the site that are outside of docs/, and links that work in both places.

In a checkout a link is a path from file to file. On the site the files lie elsewhere,
so each link is turned; one to a file that the site has not becomes its text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = {
    "benchmarks/README.md": "reference/benchmarks.md",
    "examples/torchtitan.md": "reference/torchtitan.md",
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "reference/contributing.md",
}
"""Path in the checkout: page of the site."""
_PLACES = {page: path for path, page in OUTSIDE.items()}
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    root = Path(config.docs_dir).parent
    for path, page in OUTSIDE.items():
        text = (root / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Turn the links of a page."""
    here = page.file.src_uri
    folder = posixpath.dirname(_PLACES.get(here, f"docs/{here}"))

    def turned(match: re.Match[str]) -> str:
        picture, text, link = match.groups()
        path, hash_, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        shown = OUTSIDE.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(shown) is None:
            exists = (Path(config.docs_dir).parent / target).exists()
            return text if exists else match[0]  # mkdocs warns of the latter
        link = posixpath.relpath(shown, posixpath.dirname(here) or ".")
        return f"{picture}[{text}]({link}{hash_}{anchor})"

    return _LINK.sub(turned, markdown)
