"""The documentation site: built without a warning, whole, and without foreign hosts."""

import html
import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from pages import ROOT

from zbpp.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.needs("mkdocs_jupyter")]

MODULES = [
    *("zbpp", "zbpp.averaging"),
    *("zbpp.diagnostics", "zbpp.memory", "zbpp.checkpoint", "zbpp.models"),
    *("zbpp.runtime", "zbpp.simulator", "zbpp.schedules", "zbpp.planning"),
    *("zbpp.profiling", "zbpp.tuning", "zbpp.core"),
]
COMMANDS = ["plan", "show", "compare", "mesh", "train", "bench", "profile", "estimate"]
COMMANDS += ["doctor"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """What ``make docs`` builds."""
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stderr
    return folder


def text_of(page: Path) -> str:
    """The text of a page, without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_every_public_name_is_in_the_reference(site):
    head = (site / "objects.inv").read_bytes().split(b"\n", 4)
    known = {line.split()[0] for line in zlib.decompress(head[4]).decode().splitlines()}
    for name in MODULES:
        module = importlib.import_module(name)
        for inner in module.__all__:
            home = getattr(getattr(module, inner), "__module__", name)
            places = {f"{name}.{inner}", f"{home}.{inner}"}
            assert places & known or f"{name}.{inner}" in MODULES, (name, inner)


def test_the_page_of_commands_has_the_help_of_each(site, capsys):
    page = text_of(site / "reference" / "commands.html")
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        assert capsys.readouterr().out.rstrip() in page, command


def test_the_digest_has_every_page_and_name(site):
    digest = (site / "llms.txt").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        title = re.findall(r"^# .*$", page.read_text(), re.MULTILINE)[0]
        assert f"<!-- {name} -->" in digest and title in digest, name
    for name in MODULES[1:]:
        for inner in importlib.import_module(name).__all__:
            assert f"* `{inner}" in digest, (name, inner)
    assert "\n::: " not in digest and "* `zbpp.Pipeline(model" in digest


def test_the_notebooks_have_pages_with_their_outputs(site):
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        page = site / "notebooks" / f"{path.stem}.html"
        assert "jp-OutputArea-output" in page.read_text(encoding="utf-8")
        assert "Traceback" not in text_of(page)


def foreign(text: str) -> list[str]:
    """What a page would fetch from another host when it is opened."""
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text)
    return [
        url
        for tag in tags
        if 'rel="canonical"' not in tag
        for url in re.findall(r'(?:src|href)="?((?:https?:)?//[^" >]+)', tag)
    ]


def test_no_page_fetches_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert not foreign(page.read_text(encoding="utf-8")), page
    assert foreign('<script src="https://example.org/a.js"></script>')
