"""Build the simulated device for the installed torch, once for each state of both."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
BUILDS = CACHE / "zbpp" / "simgpu"
DEVICE = ("streams", "memory", "device", "kernels")
FLAGS = (
    "-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-unused", "-Wno-sign-compare",
    "-Wno-interference-size", "-Wno-reorder",
)  # fmt: skip


def built() -> Path:
    """Return the folder of the libraries for this torch; build them if they are not.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    key = hashlib.sha256(f"{version('torch')} {sys.version} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    folder = BUILDS / key.hexdigest()[:16]
    if not (folder / "_simgpu.so").exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as unfinished:
            _build(Path(unfinished))
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(shutil.copytree(unfinished, f"{unfinished}-done"), folder)
    return folder


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _build(folder: Path) -> None:
    if shutil.which("g++") is None:
        raise RuntimeError("the simulated device is built by g++, which is not here")
    torch = torch_folder()
    include = torch / "include"
    compiling = [
        "g++", *FLAGS, f"-I{include}", f"-I{include}/torch/csrc/api/include",
        f"-I{sysconfig.get_paths()['include']}",
    ]  # fmt: skip
    names = (*DEVICE, "module")
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        done = workers.map(
            lambda name: _run(
                *compiling, "-c", f"{SOURCES / name}.cpp", "-o", f"{folder / name}.o"
            ),
            names,
        )
        for _ in done:
            pass
    libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]  # of any environment
    _run(
        "g++", "-shared", *(f"{folder / name}.o" for name in DEVICE), *libraries,
        "-o", f"{folder}/libsimgpu.so",
    )  # fmt: skip
    _run(
        "g++", "-shared", f"{folder}/module.o", f"-L{folder}", "-lsimgpu", *libraries,
        "-ltorch", "-ltorch_python", "-Wl,-rpath,$ORIGIN", "-o", f"{folder}/_simgpu.so",
    )  # fmt: skip
    for name in names:
        (folder / f"{name}.o").unlink()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[-3:])}:\n{done.stderr[-4000:]}")
