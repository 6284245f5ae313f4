"""Sessions in docstrings, as code: Markdown takes ``>>>`` as a quotation."""

import re
from typing import Any

import griffe

_SESSION = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences the sessions of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring before it is parsed."""
        if obj.docstring is not None:
            fenced = _SESSION.sub(_fence, obj.docstring.value)
            obj.docstring.value = fenced


def _fence(match: re.Match[str]) -> str:
    return f"```pycon\n{match[0].rstrip()}\n```\n"
