"""Write the playground into a folder of the site: make playground.

The planner runs in the browser, by Pyodide; its npm package is fetched and unpacked
unless a folder that holds it is named.
"""

import argparse
import subprocess
import tarfile
import tempfile
from pathlib import Path

from zbpp.cli.playground.site import PYODIDE, write_site


def main() -> None:
    """Write the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pyodide", type=Path, help="the unpacked npm package")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_site(options.out, options.pyodide or fetched(Path(folder)))
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {size / 2**20:.1f} MiB")


def fetched(folder: Path) -> Path:
    """Fetch the npm package, and unpack it."""
    command = ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


if __name__ == "__main__":
    main()
