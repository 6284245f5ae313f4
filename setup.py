"""Build the inner loops of the planner, in C; all else stands in pyproject.toml."""

from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_LOOPS = "src/zbpp/schedules/planner/compiled"


def _stamp() -> str:
    """Tell these sources of the loops from others; `library.py` does the same."""
    files = sorted(Path(_LOOPS).glob("*.[ch]"))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class _BuildLibrary(build_ext):
    """Build a library for ctypes, which is no module and needs no Python headers."""

    def get_ext_filename(self, fullname: str) -> str:
        """Name it so that nothing takes it for a module."""
        return str(Path(*fullname.split(".")).with_suffix(".shared"))


setup(
    cmdclass={"build_ext": _BuildLibrary},
    ext_modules=[
        Extension(
            "zbpp.schedules.planner.compiled.loops",
            [
                f"{_LOOPS}/{name}.c"
                for name in ("list_scheduler", "critical_path", "lane_scheduler")
            ],
            depends=[f"{_LOOPS}/loops.h"],
            define_macros=[("ZBPP_STAMP", f'"{_stamp()}"')],
            # no fused operations: plans are those of Python to the last bit
            extra_compile_args=["-O2", "-ffp-contract=off"],
            optional=True,
        )
    ],
)
