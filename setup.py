"""Find the packages; the folders schedules/ and simulator/ are imported as zbpp.*."""

from hashlib import sha256
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

_BESIDE = ("schedules", "simulator")
_LOOPS = "schedules/planner/compiled"


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
    packages=[
        *find_packages(include=["zbpp", "zbpp.*"]),
        *(
            f"zbpp.{name}"
            for top in _BESIDE
            for name in find_packages(include=[top, f"{top}.*"])
        ),
    ],
    cmdclass={"build_ext": _BuildLibrary},
    ext_modules=[
        Extension(
            "zbpp.schedules.planner.compiled.loops",
            [
                f"{_LOOPS}/{name}.c"
                for name in ("line", "placement", "weights", "moves")
            ],
            depends=[f"{_LOOPS}/loops.h"],
            define_macros=[("ZBPP_STAMP", f'"{_stamp()}"')],
            # no fused operations: plans are those of Python to the last bit
            extra_compile_args=["-O2", "-ffp-contract=off"],
            optional=True,
        )
    ],
)
