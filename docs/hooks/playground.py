"""The playground's place in the menu, where its page is there."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the page before the concepts."""
    for page in ("playground/index.md", "playground.md", "playground/index.html"):
        if (Path(config.docs_dir) / page).exists() and config.nav is not None:
            titles = [next(iter(entry)) for entry in config.nav]
            config.nav.insert(titles.index("Concepts"), {"Playground": page})
            break
    return config
