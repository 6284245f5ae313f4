"""The package as others get it: sdist, wheel from it, install, use from elsewhere."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"zbpp": "zbpp", "schedules": "zbpp/schedules", "simulator": "zbpp/simulator"}
"""Folders of the checkout, and where their modules are imported from."""
LOOPS = ("list_scheduler.c", "critical_path.c", "loops.h")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        words, cwd=cwd, env=clean, capture_output=True, text=True, timeout=200
    )


def must_run(*command: str | Path, cwd: Path) -> str:
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy named zbpp; a build folder in the checkout may hold deleted modules."""
    copy = tmp_path_factory.mktemp("beside") / "zbpp"
    unwanted = shutil.ignore_patterns("__pycache__", "*.shared", "*.egg-info")
    for source in ("src", *SOURCES):
        shutil.copytree(ROOT / source, copy / source, symlinks=True, ignore=unwanted)
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    return copy


def build(kind: str, checkout: Path, out: Path) -> Path:
    """Call the build backend as pip does, with what is installed here."""
    code = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
    must_run(sys.executable, "-c", code, out, cwd=checkout)
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out)
    must_run(sys.executable, "-m", "pip", "wheel", *options, sdist, cwd=out)
    (path,) = out.iterdir()
    return path


def environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with a wheel; its dependencies are those of this one."""
    venv.create(folder, with_pip=False)
    scripts = folder / ("Scripts" if sys.platform == "win32" else "bin")
    executable = scripts / "python"
    options = ("--python", executable, "install", "--no-deps", "--no-index")
    must_run(sys.executable, "-m", "pip", *options, wheel, cwd=folder)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(must_run(executable, "-c", code, cwd=folder).strip())
    # A path file adds a folder without reading the path files in it: the editable
    # install of the checkout stays out of reach.
    folders = [path for path in sys.path if Path(path).name == "site-packages"]
    (own / "dependencies.pth").write_text("\n".join(folders) + "\n")
    return executable


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("installed"), wheel)


def modules() -> set[str]:
    """Paths in the wheel of every module."""
    return {
        f"{package}/{path.relative_to(ROOT / source)}"
        for source, package in SOURCES.items()
        for path in (ROOT / source).rglob("*.py")
    }


def beside_modules() -> set[str]:
    """Paths in the wheel of what a page is made of."""
    folder = ROOT / "simulator" / "page"
    found = [*folder.glob("*.js"), *folder.glob("*.css")]
    assert len(found) >= 3
    return {f"zbpp/simulator/page/{path.name}" for path in found}


def test_torch_finds_the_backend_by_its_name(python, tmp_path):
    code = (
        "import torch._dynamo as d; from torch._dynamo.backends import registry as r; "
        "print('zbpp' in d.list_backends(), r.lookup_backend('zbpp').__module__)"
    )
    found = must_run(python, "-W", "ignore", "-c", code, cwd=tmp_path)
    assert found.split() == ["True", "zbpp.runtime.compiled.backend"]


def test_a_page_is_written_from_the_wheel(python, tmp_path):
    flags = ("plot", "1F1B,ZBH1", "--stages", "2", "--microbatches", "3")
    must_run(python, "-m", "zbpp", *flags, "--out", "x.html", cwd=tmp_path)
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "performance.mark" in text and "--ground" in text


def test_the_sdist_has_every_module_readme_and_license(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    packaged = {"zbpp/py.typed", *modules()}
    packaged |= {f"zbpp/schedules/planner/compiled/{name}" for name in LOOPS}
    assert {*FILES, *(f"src/{path}" for path in packaged)} <= names


def test_the_wheel_has_every_module_the_marker_and_the_license(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"zbpp/py.typed", *beside_modules()} <= names
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert {name for name in names if name.endswith(".py")} == modules()
    built = [name for name in names if "planner/compiled/loops" in name]
    assert bool(built) == bool(shutil.which("cc"))


def test_a_wheel_is_built_without_a_compiler(sdist, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-compiler")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "out")
    must_run(sys.executable, "-m", "pip", "wheel", *options, sdist, cwd=tmp_path)
    (path,) = (tmp_path / "out").iterdir()
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    assert "zbpp/schedules/planner/compiled/library.py" in names
    assert not [name for name in names if name.endswith(".shared")]


def import_all(python: Path, names: list[str], cwd: Path) -> str:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    module = importlib.import_module(name)\n"
        "    print(module.__file__)\n"
    )
    return must_run(python, "-c", code, *names, cwd=cwd)


def test_every_module_of_the_checkout_is_imported_from_the_wheel(python, tmp_path):
    names = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in modules()
        if not path.endswith("__main__.py")
    ]
    assert {"zbpp.runtime.optim.rollback", "zbpp.schedules.planner"} <= {*names}
    for file in import_all(python, names, tmp_path).splitlines():
        assert Path(file).is_relative_to(python.parents[1])
    with pytest.raises(AssertionError, match=r"zbpp\.core\.missing"):
        import_all(python, ["zbpp.core.missing"], tmp_path)


def test_a_script_beside_an_editable_checkout_finds_the_package(checkout, tmp_path):
    """Its folder holds one named zbpp, which Python would take as a namespace."""
    script = checkout.parent / "train.py"
    script.write_text(
        "import zbpp\n"
        "from zbpp.schedules import plan_vpp\n"
        "from zbpp.simulator import simulate\n"
        "print(zbpp.__file__, zbpp.plan('ZBV', n_stages=2, n_microbatches=2).name)\n"
    )
    editable = build("editable", checkout, tmp_path / "wheel")
    python = environment(tmp_path / "environment", editable)
    file, mode = must_run(python, script, cwd=checkout.parent).split()
    assert (Path(file), mode) == (checkout / "src/zbpp/__init__.py", "ZBV")
    for name in ("schedules", "simulator"):  # may be the script's own
        result = run(python, "-c", f"import {name}", cwd=tmp_path)
        assert f"No module named '{name}'" in result.stderr


def test_the_bare_names_stay_free(python, tmp_path):
    code = "from importlib.util import find_spec as find; print(find('%s'), find('%s'))"
    found = must_run(python, "-c", code % ("schedules", "simulator"), cwd=tmp_path)
    assert found.split() == ["None", "None"]


def test_the_commands_work(python, tmp_path):
    flags = ("show", "1F1B", "--stages", "4", "--microbatches", "8")
    shown = must_run(python, "-m", "zbpp", *flags, cwd=tmp_path)
    assert "27.27%" in shown
    assert must_run(python.parent / "zbpp", *flags, cwd=tmp_path) == shown


def test_the_wheel_asks_for_what_it_imports(wheel):
    """A plain install plans and simulates; torch and matplotlib are extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:")]
    plain = {line.split()[1].partition(">")[0] for line in required if ";" not in line}
    assert plain == {"cyclopts", "rich"}
    assert 'Requires-Dist: torch>=2.13; extra == "train"' in required
    assert 'Requires-Dist: matplotlib>=3.10; extra == "viz"' in required
