"""The package as others get it: sdist, wheel from it, install, use from elsewhere."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"zbpp": "zbpp", "schedules": "zbpp/schedules", "simulator": "zbpp/simulator"}
"""Folders of the checkout, and where their modules are imported from."""
FILES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
)

pytestmark = pytest.mark.slow


def run(*command, cwd):
    """Run a command that must succeed, without the checkout on the path."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy named zbpp; a build folder in the checkout may have deleted modules."""
    copy = tmp_path_factory.mktemp("beside") / "zbpp"
    unwanted = shutil.ignore_patterns("__pycache__", "*.shared", "*.egg-info")
    for source in ("src", *SOURCES):
        shutil.copytree(ROOT / source, copy / source, symlinks=True, ignore=unwanted)
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    """Of the build backend, called as pip does, with what is installed here."""
    out = tmp_path_factory.mktemp("sdist")
    code = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, out, cwd=checkout)
    (path,) = out.iterdir()
    return path


def wheel_of(sdist, out):
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out)
    run(sys.executable, "-m", "pip", "wheel", *options, sdist, cwd=out)
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    return wheel_of(sdist, tmp_path_factory.mktemp("wheel"))


def environment(folder, wheel):
    """Make an environment with a wheel; its dependencies are those of this one."""
    venv.create(folder, with_pip=False)
    executable = folder / "bin" / "python"
    options = ("--python", executable, "install", "--no-deps", "--no-index")
    run(sys.executable, "-m", "pip", *options, wheel, cwd=folder)
    # A path file adds a folder without reading the path files in it: the editable
    # install of the checkout stays out of reach.
    folders = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(folders) + "\n")
    return executable


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("installed"), wheel)


def packaged(*suffixes):
    """Paths in the wheel of the checkout's files."""
    return {
        f"{package}/{path.relative_to(ROOT / source)}"
        for source, package in SOURCES.items()
        for path in (ROOT / source).rglob("*.*")
        if path.suffix in suffixes
    }


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def about(wheel, file):
    files = contents(wheel)
    (text,) = [text for name, text in files.items() if name.endswith(f"info/{file}")]
    return text.decode()


def test_the_sdist_has_all_sources_and_no_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = packaged(".py", ".js", ".css", ".html", ".c", ".h", ".typed")
    assert {*FILES, *(f"src/{path}" for path in sources)} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = {name for name in contents(wheel) if ".dist-info/" not in name}
    expected = packaged(".py", ".js", ".css", ".html")
    assert any(name.endswith((".js", ".css", ".html")) for name in expected)
    (loops,) = names - expected - {"zbpp/py.typed"}
    assert loops.endswith(".shared") and expected <= names
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")


@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_a_build_without_a_compiler_asks_for_ziglang(checkout, monkeypatch, compiler):
    code = "import setuptools.build_meta as b; print(b.get_requires_for_build_wheel())"
    monkeypatch.setenv("CC", compiler)
    is_asked = "ziglang" in run(sys.executable, "-c", code, cwd=checkout)
    has_compiler = shutil.which(compiler) or importlib.util.find_spec("ziglang")
    assert is_asked == (not has_compiler)


def test_the_wheel_lists_its_dependencies_and_its_readme_has_no_relative_links(wheel):
    """A plain install plans and simulates; torch and matplotlib are extras."""
    text = about(wheel, "METADATA")
    required = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    plain = {line.partition(">")[0] for line in required if ";" not in line}
    assert plain == {"cyclopts", "networkx", "numpy", "rich"}
    assert 'torch>=2.13; extra == "train"' in required
    assert 'matplotlib>=3.10.7; extra == "viz"' in required
    assert "License-Expression: Apache-2.0\n" in text
    assert "Copyright 2026 the zbpp authors" in about(wheel, "licenses/LICENSE")
    assert not re.search(r"\]\((?!https?://)", text)
    assert re.search(r"\]\((?!https?://)", (ROOT / "README.md").read_text())


IMPORTS = """
import importlib, sys
from importlib.util import find_spec
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
import torch._dynamo
from torch._dynamo.backends.registry import lookup_backend
assert "zbpp" in torch._dynamo.list_backends() and lookup_backend("zbpp")
assert find_spec("schedules") is None and find_spec("simulator") is None
"""


def test_the_installed_wheel_has_every_module_the_backend_and_the_command(
    python, tmp_path
):
    names = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in packaged(".py")
        if not path.endswith("__main__.py")
    ]
    files = run(python, "-W", "ignore", "-c", IMPORTS, *names, cwd=tmp_path)
    assert len(files.splitlines()) == len(names) > 50
    for file in files.splitlines():
        assert Path(file).is_relative_to(python.parents[1])
    flags = ("show", "1F1B,ZBH1", "-p", "4", "-m", "8", "-o", "x.html")
    assert run(python.parent / "zbpp", *flags, cwd=tmp_path) == "x.html\n"
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "27.27%" in text and "<script>" in text and "<style>" in text


# At night: another build.


@pytest.mark.nightly
def test_a_wheel_is_built_without_a_compiler(wheel, sdist, tmp_path, monkeypatch):
    """Hand-made orders work: tests/plans/test_loops.py."""
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("CC", "/bin/false")
    other = wheel_of(sdist, tmp_path / "out")
    assert other.name.endswith("-py3-none-any.whl")
    (missing,) = contents(wheel).keys() - contents(other).keys()
    assert missing.endswith(".shared")
    pure = environment(tmp_path / "pure", other)
    run(pure, "-m", "zbpp", "show", "1F1B", "-p", "2", "-m", "2", cwd=tmp_path)
