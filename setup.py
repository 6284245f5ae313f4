"""The build of the loops in C, and the README of the package index."""

import re
import runpy
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_FOLDER = Path("src/zbpp/schedules/planner/compiled")
_BUILD = runpy.run_path(str(_FOLDER / "build.py"))
_LINK = re.compile(r"!?\[([^]]*)\]\((?!https?://)([^)]+)\)")


def _readme() -> str:
    """README.md with links that lead somewhere when it stands on a package index.

    They lead to the Repository of pyproject.toml; while it names none, only their
    texts are left, and pictures are left out.
    """
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    base = project["project"].get("urls", {}).get("Repository", "").rstrip("/")

    def absolute(link: re.Match[str]) -> str:
        text, target = link.groups()
        is_picture = link[0].startswith("!")
        if base:
            place = f"{base}/{'raw' if is_picture else 'blob'}/main/{target}"
            return f"{'!' * is_picture}[{text}]({place})"
        return "" if is_picture else text

    return _LINK.sub(absolute, Path("README.md").read_text(encoding="utf-8"))


class _BuildLibrary(build_ext):
    """Build a library for ctypes, which is no module and needs no Python headers."""

    def build_extension(self, ext: Extension) -> None:
        """Compile the loops; without them the package has hand-made orders only."""
        if fault := _BUILD["compile_loops"](Path(self.get_ext_fullpath(ext.name))):
            self.warn(f"the planner's loops are not built: {fault}")

    def get_ext_filename(self, fullname: str) -> str:
        """Name it so that nothing takes it for a module."""
        return str(Path(*fullname.split(".")).with_suffix(".shared"))


class _TagByLibrary(bdist_wheel):
    """Tag the wheel by what is in it: the library is of a machine, not of a Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python; this platform if the loops were built, else any."""
        built = any(map(Path.is_file, map(Path, self._libraries())))
        return "py3", "none", super().get_tag()[2] if built else "any"

    def _libraries(self) -> list[str]:
        return self.get_finalized_command("build_ext").get_outputs()


setup(
    long_description=_readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": _BuildLibrary, "bdist_wheel": _TagByLibrary},
    # pip fetches it for the build, where there is no other compiler
    setup_requires=[] if _BUILD["compiler"]() else ["ziglang"],
    ext_modules=[
        Extension(
            "zbpp.schedules.planner.compiled.loops",
            [str(path) for path in _FOLDER.glob("*.c")],
            depends=[str(path) for path in _FOLDER.glob("*.h")],
            optional=True,
        )
    ],
)
