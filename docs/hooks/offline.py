"""No request to another host: the one script that the theme would fetch is ours.

The plugin `offline` lets the search run in pages that are opened as files. It takes a
script for it from another host; docs/assets/ has the same one.
"""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

_FETCHED = "https://unpkg.com/iframe-worker/shim"
_OURS = "assets/iframe-worker.js"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take our copy."""
    return output.replace(_FETCHED, get_relative_url(_OURS, page.url))


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Take our copy in pages such as 404.html, which lie at the top."""
    return output.replace(_FETCHED, _OURS)
