"""Run a GPU day: `make gpu`, or ``python benchmarks/gpu``; see `day`."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print(f"gpu day: {sys.executable} has no torch; see `make gpu PYTHON=...`")
        sys.exit(2)
    if sys.argv[1:] == ["--look"]:
        from gpu.look import look

        sys.exit(look())
    from gpu.day import main

    sys.exit(main(sys.argv[1:]))
