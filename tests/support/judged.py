"""The judge of the benchmarks, which shares no code with zbpp, as an oracle."""

import importlib.util
from pathlib import Path

__all__ = ["judge"]

_PATH = Path(__file__).parents[2] / "benchmarks" / "judge.py"
_spec = importlib.util.spec_from_file_location("judge", _PATH)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
judge = _module.judge
