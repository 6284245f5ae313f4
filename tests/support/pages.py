"""The documents as programs: their commands, sessions, files, links and names.

A code block is read by its language:

    bash    lines to type; those of zbpp run in their order, in one folder a page
    python  with >>>: a session, one a page; else a file
    diff    a script before and after, as a file
    json    a file; parsed as a schedule, as costs, or as costs of layers
    text    begins with "$ zbpp ...": what the command prints, in part

A file is named in backticks, with a colon, at the end of the line before its block.
"""

import doctest
import io
import json
import os
import pydoc
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from zbpp.cli import main
from zbpp.core import parse_schedule, read_costs, read_layers
from zbpp.planning import read_plan

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:^([^\n]*)\n\n?)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_FOLDERS = (
    "docs|examples|tests|zbpp|schedules|simulator|benchmarks|notebooks|constraints"
)
_NOT_OURS = {
    *("--help", "--nproc-per-node", "--parallelism", "--pid", "--room"),
    *("--skip", "--training", "--nnodes", "--node-rank", "--master-addr"),
    *("--master-port", "--max-restarts", "--log-dir", "--redirects"),
    *("--local-ranks-filter",),
}
_BUILT = re.compile(
    r"docs/(reference/(commands|changelog|benchmarks|python/\w+)\.md|"
    r"start/example_report\.html)"
)
"""What only the built site has, made by docs/hooks."""


@dataclass(frozen=True)
class Block:
    """A block of code, and the line of prose before it."""

    before: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name under which it is to be saved."""
        named = re.search(r"`([\w.]+)`:$", self.before)
        return named[1] if named else None

    def side(self, mark: str) -> str:
        """Of a diff, the text before (``-``) or after (``+``) the change."""
        lines = self.text.splitlines(keepends=True)
        return "".join(line[1:] or line for line in lines if line[0] in f"{mark} \n")


@dataclass(frozen=True)
class Page:
    """One document."""

    name: str
    text: str

    @classmethod
    def read(cls, name: str) -> "Page":
        return cls(name, (ROOT / name).read_text(encoding="utf-8"))

    def blocks(self, language: str) -> list[Block]:
        found = (Block(*match) for match in _BLOCK.findall(self.text))
        return [block for block in found if block.language == language]

    def commands(self, program: str | None = None) -> list[list[str]]:
        """Words of the lines to type; of one program: without its name."""
        lines = [line for b in self.blocks("bash") for line in b.text.splitlines()]
        words = [shlex.split(line, comments=True) for line in lines if line.strip()]
        if program is None:
            return words
        return [rest for first, *rest in words if first == program]

    def session(self) -> str:
        texts = [block.text for block in self.blocks("python")]
        return "\n".join(text for text in texts if ">>>" in text)

    def files(self) -> dict[str, str]:
        blocks = self.blocks("python") + self.blocks("json")
        texts = {block.file: block.text for block in blocks if block.file}
        return texts | {x.file: x.side("+") for x in self.blocks("diff") if x.file}

    def save_files(self, folder: Path) -> None:
        for name, text in self.files().items():
            (folder / name).write_text(text, encoding="utf-8")


def run_session(page: Page, folder: Path) -> int:
    """Run all examples of a page as one session; return how many there are."""
    parsed = doctest.DocTestParser().get_doctest(page.session(), {}, page.name, None, 0)
    said: list[str] = []
    with chdir(folder):
        failed = doctest.DocTestRunner().run(parsed, out=said.append).failed
    assert not failed, "".join(said)
    return len(parsed.examples)


_RUNS = ("train", "profile", "bench", "estimate")
"""Commands that run a model, or trace one."""
_ON_RANKS = ("train", "profile", "bench")
"""Commands that start processes; here they are forked, which takes less time."""
_PICTURES = (".png", ".svg", ".pdf", "report.html")
_WRITTEN = ("--costs_out", "--metrics", "--out", "--layers_out", "--trace")
"""Flags of theirs that name files to write."""


def is_dear(words: list[str]) -> bool:
    """True for what takes seconds: running models, drawing."""
    return words[0] in _RUNS or any(word.endswith(_PICTURES) for word in words)


def run_commands(page: Page, folder: Path, *, dear: bool) -> int:
    """Run the zbpp commands of a page in their order; return how many.

    Unless ``dear``, commands that are so are left out, and what reads their files.
    """
    page.save_files(folder)
    found = page.commands("zbpp")
    written = {word for words in found for word in _written_by_run(words)}
    if not dear:
        found = [c for c in found if not is_dear(c) and not written & _paths(c)]
    with chdir(folder):
        for words in found:
            if words[0] in _ON_RANKS and (n_ranks := _stages_of(words)):
                run_on_ranks(n_ranks, folder, "zbpp", *words)
            else:
                assert main(words) == 0, words
    return len(found)


def _stages_of(words: list[str]) -> int:
    """Stages that a command names, itself or by a plan; 0: none."""
    if "--stages" in words:
        return int(words[words.index("--stages") + 1])
    is_plan = words[1].endswith(".json")
    return read_plan(words[1]).schedule.placement.n_stages if is_plan else 0


def _paths(words: list[str]) -> set[str]:
    """The words, and the folders in which the files that they name are."""
    folders = (str(parent) for word in words for parent in Path(word).parents)
    return {*words, *folders}


def _written_by_run(words: list[str]) -> set[str]:
    pairs = pairwise(words) if words[0] in _RUNS else ()
    return {path for flag, path in pairs if flag in _WRITTEN}


def run_script(path: Path, *arguments: str) -> None:
    """Run a file as ``python path arguments`` would, in this process."""
    before, sys.argv = sys.argv, [path.name, *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before


def run_on_ranks(n_ranks: int, folder: Path, program: str, *arguments: str) -> str:
    """Run a script, or ``zbpp``, as torchrun would; return what the ranks print."""
    from ranks import end_of

    ended = end_of(_run_in, n_ranks, str(folder), program, arguments)
    words = "".join(rank.words for rank in ended)
    assert all(rank.code == 0 for rank in ended), words
    return words


def _run_in(folder: str, program: str, arguments: Sequence[str]) -> None:
    os.chdir(folder)
    if program == "zbpp":
        sys.exit(main(list(arguments)))
    run_script(Path(program), *arguments)


def shown_lines(
    page: Page, program: str = "zbpp"
) -> Iterator[tuple[list[str], list[str]]]:
    """Commands of a program whose output is shown, and the lines shown of it."""
    for block in page.blocks("text"):
        first, *lines = block.text.splitlines()
        ran, *words = shlex.split(first.removeprefix("$ "))
        assert first.startswith("$ ") and ran in ("zbpp", "python"), first
        if ran == program:
            yield words, lines


def parse_data(page: Page) -> int:
    """Parse all JSON that is shown; return how many blocks."""
    blocks = page.blocks("json")
    for block in blocks:
        if '"format"' in block.text:
            parse_schedule(block.text)
        else:
            read = read_layers if '"n_layers"' in block.text else read_costs
            read(json.loads(block.text))
    return len(blocks)


def missing_paths(page: Page) -> list[str]:
    """Links and paths in backticks that lead nowhere."""
    here = (ROOT / page.name).parent
    linked = re.findall(r"\]\((?!http)([^)]+)\)", page.text)
    quoted = re.findall(rf"`((?:{_FOLDERS})/[\w./-]*)`", page.text)
    missing = [
        name
        for name in quoted
        if not any((folder / name).exists() for folder in (ROOT, here))
    ]
    for link in linked:
        name, _, anchor = link.partition("#")
        path = (here / name).resolve() if name else ROOT / page.name
        if _BUILT.fullmatch(path.relative_to(ROOT).as_posix()):
            continue
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            missing.append(link)
    return missing


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def unknown_flags(page: Page) -> list[str]:
    """Flags that no zbpp command has."""
    text = page.text
    if page.name.startswith("docs/coming_from"):  # flags of others on the left
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - _NOT_OURS
    known = _flags()
    return sorted(flag for flag in named if flag[2:].replace("-", "_") not in known)


@cache
def _flags() -> set[str]:
    """Flags that the help of the commands lists, and their negations."""
    commands = re.findall(r"^│ (\w+) ", _help(), re.MULTILINE)
    texts = "".join(_help(command) for command in commands)
    flags = set(re.findall(r"--(\w+)", texts))
    return flags | {f"no_{flag}" for flag in flags}


def _help(*words: str) -> str:
    wide = mock.patch.dict(os.environ, COLUMNS="200")  # no flag is broken
    with wide, redirect_stdout(io.StringIO()) as printed:
        assert main([*words, "--help"]) == 0
    return printed.getvalue()


def unknown_names(page: Page) -> list[str]:
    """Dotted names of zbpp in backticks that cannot be imported."""
    named = set(re.findall(r"`(zbpp(?:\.\w+)+)", page.text))
    return sorted(name for name in named if pydoc.locate(name) is None)


SCHEMAS: dict[str, Any] = {
    path.name.partition(".")[0]: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "docs/reference/schemas").glob("*.schema.json"))
}
"""What files of the commands look like, by their kind."""


@cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator  # slow to load
    from referencing import Registry, Resource

    Draft202012Validator.check_schema(SCHEMAS[name])
    registry: Registry[Any] = Registry().with_resources(
        (f"{name}.schema.json", Resource.from_contents(schema))
        for name, schema in SCHEMAS.items()
    )
    return Draft202012Validator(SCHEMAS[name], registry=registry)


def mistakes(name: str, data: Any) -> list[str]:
    """What a schema finds wrong with data, each with its place."""
    found = _validator(name).iter_errors(data)
    return [f"{error.json_path}: {error.message}" for error in found]
