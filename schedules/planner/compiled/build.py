"""Compile the loops with a C compiler of the machine, or with that of ziglang.

setup.py runs this file alone, so it imports the standard library only.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path


def sources() -> list[Path]:
    """The C files of a checkout; a wheel has none."""
    return sorted(Path(__file__).parent.glob("*.[ch]"))


def stamp() -> str:
    """A hash of the sources, which the library contains."""
    return sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()


def compiler() -> list[str] | None:
    """The command of a C compiler: ``$CC``, cc, or that of ziglang; None without."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if command and shutil.which(command[0]):
        return command
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def compile_loops(target: Path) -> str:
    """Build the library; return what went wrong, or an empty string."""
    command = compiler()
    if command is None:
        return "there is no C compiler"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder, target.name)
        # No fused operations: plans are the same on every machine, to the last bit
        flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC"]
        files = [str(path) for path in sources() if path.suffix == ".c"]
        macro = f'-DZBPP_STAMP="{stamp()}"'
        result = subprocess.run(
            [*command, *flags, macro, "-o", str(built), *files, "-lm"],
            capture_output=True,
            text=True,
        )
        if result.returncode:
            return result.stderr.strip() or f"{command[0]} failed"
        built.replace(target)  # whole: other processes may load it meanwhile
    return ""
