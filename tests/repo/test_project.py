"""Files of the project itself: workflows, templates, citation."""

import re
import tomllib
from typing import Any

import pytest
import yaml
from pages import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def targets() -> list[re.Pattern[str]]:
    """The targets of the Makefile; % stands for any text."""
    makefile = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^([a-z][\w%. -]*):(?!=)", makefile, re.MULTILINE)
    names = {name for line in lines for name in line.split()}
    return [re.compile(re.escape(name).replace("%", ".+")) for name in names]


def unknown(workflow: dict[str, Any]) -> list[str]:
    """The targets that a workflow makes and the Makefile lacks."""
    made = []
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            line = step.get("run", "make test")
            for values in matrix.values():
                made += [re.sub(r"\$\{\{.*?\}\}", x, line) for x in values]
    assert made
    known = targets()
    names = [line.split()[1] for line in made]
    return [x for x in names if not any(target.fullmatch(x) for target in known)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_existing_make_targets(path: Any) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert unknown(workflow) == []
    workflow["jobs"]["x"] = {
        "strategy": {"matrix": {"command": ["test-nothing"]}},
        "steps": [{"run": "make ${{ matrix.command }}"}],
    }
    assert unknown(workflow) == ["test-nothing"]


def test_the_makefile_has_at_most_ten_targets() -> None:
    assert 5 < len(targets()) <= 10


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_have_the_keys_that_github_requires(path: Any) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_citation_matches_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == package["version"]
    assert citation["license"] == package["license"]
