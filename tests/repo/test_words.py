"""Words of a private dialect, which plain English of the field replaces."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest
from pages import ROOT

MOST = {
    "alongside": (0, 0),
    "anew": (0, 0),
    "as ever": (0, 0),
    "beside": (0, 0),
    "dealt": (0, 0),
    "dear": (0, 0),
    "goes on": (0, 0),
    "hand on": (0, 0),
    "hands? over": (0, 0),
    "held": (0, 0),
    "holds?": (0, 0),
    "in turns": (0, 0),
    "likewise": (0, 0),
    "mend": (0, 0),
    "nobody": (0, 0),
    "own": (0, 0),
    "says?": (0, 0),
    "seldom": (0, 0),
    "shall": (0, 0),
    "stands": (0, 0),
    "theirs": (0, 0),
    "told": (0, 0),
    "whoever": (0, 0),
}
"""Most uses in the documents, and in texts of the source: numbers only fall."""
DOCUMENTS = "README.md CONTRIBUTING.md CHANGELOG.md benchmarks/README.md"
CODE = re.compile(r"```.*?```", re.DOTALL)


def prose_of_documents() -> str:
    paths = [*(ROOT / "docs").rglob("*.md"), *(ROOT / x for x in DOCUMENTS.split())]
    return "\n".join(CODE.sub("", path.read_text()) for path in paths)


def texts_of(paths: Iterable[Path]) -> str:
    """Comments, docstrings, errors and help texts: strings of several words."""
    texts = [path.read_text() for path in paths]
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    values = (node.value for node in nodes if isinstance(node, ast.Constant))
    strings = [x for x in values if isinstance(x, str) and " " in x]
    lines = (io.StringIO(text).readline for text in texts)
    tokens = (token for line in lines for token in tokenize.generate_tokens(line))
    comments = [x.string for x in tokens if x.type == tokenize.COMMENT]
    return "\n".join([*strings, *comments])


def texts_of_source() -> str:
    folders = ("zbpp", "schedules", "simulator")
    found = {path.resolve() for x in folders for path in (ROOT / x).rglob("*.py")}
    return texts_of(sorted(found))


def count(word: str, text: str) -> int:
    pattern = rf"\b{word}\b".replace(" ", r"\s+")
    return len(re.findall(pattern, text, re.IGNORECASE))


@pytest.mark.parametrize("place", [0, 1], ids=["documents", "source"])
def test_listed_words_are_not_used_more_often(place: int) -> None:
    text = (prose_of_documents, texts_of_source)[place]()
    counts = {word: count(word, text) for word in MOST}
    assert not {word: n for word, n in counts.items() if n > MOST[word][place]}
    assert count("as ever", text + " As\never ") == counts["as ever"] + 1
