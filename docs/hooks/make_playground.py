"""Write the playground into a folder of the site: make playground.

The planner runs in the browser, by Pyodide, whose npm package is fetched and unpacked
unless a folder that holds it is named. Its loops in C are built for WebAssembly by zig,
as a library that the Python in the browser loads as this Python loads its own.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from zbpp.cli.playground.site import PYODIDE, write_site

LOOPS = Path(__file__).parents[2] / "schedules" / "planner" / "compiled"


def main() -> None:
    """Write the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pyodide", type=Path, help="the unpacked npm package")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pyodide = options.pyodide or fetched(Path(folder))
        write_site(options.out, pyodide, built(Path(folder)))
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {size / 2**20:.1f} MiB")


def built(folder: Path) -> Path:
    """Build the loops for WebAssembly.

    Instructions are those of 2019, which every browser has that Pyodide runs in.
    """
    made = []
    for source in sorted(LOOPS.glob("*.c")):
        made.append(folder / f"{source.stem}.o")
        target = ["-target", "wasm32-wasi", "-mcpu=mvp+mutable_globals+bulk_memory"]
        # no fused operations: plans are those of Python to the last bit
        flags = [*target, "-O2", "-fPIC", "-ffp-contract=off"]
        zig("cc", *flags, "-c", source, "-o", made[-1])
    library = folder / "loops.shared"
    # Pyodide has the C library: what is not defined here comes from there
    flags = ["--experimental-pic", "--shared", "--export-all"]
    imports = "--unresolved-symbols=import-dynamic"
    zig("wasm-ld", *flags, imports, *made, "-o", library)
    return library


def zig(*words: str | Path) -> None:
    """Run zig, a compiler that PyPI has for every platform."""
    command = [sys.executable, "-m", "ziglang", *map(str, words)]
    subprocess.run(command, check=True)


def fetched(folder: Path) -> Path:
    """Fetch the npm package, and unpack it."""
    command = ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


if __name__ == "__main__":
    main()
