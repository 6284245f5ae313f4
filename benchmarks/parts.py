"""Parts of several scripts: tables, medians with their spread, turns, processes.

Modes take turns, run after run: a slow spell of the machine then hits all of them, and
ratios compare figures of one turn.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["end_worker", "quartiles", "show", "spread", "take_turns", "torchrun"]


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table in Markdown; None is a dash."""
    texts = [[_text(cell) for cell in row] for row in rows]
    sides = [
        "---:" if i and all(row[i][:1] in "-+.0123456789" for row in texts) else "---"
        for i in range(len(columns))
    ]
    lines = (f"| {' | '.join(line)} |" for line in (columns, sides, *texts))
    print(f"### {title}", "", *lines, "", sep="\n", flush=True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def spread(values: Sequence[float]) -> str:
    """Median, and the extremes in brackets."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def quartiles(values: Sequence[float]) -> str:
    """Median, and the quartiles in brackets."""
    if len(values) < 2:
        return spread(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def torchrun(script: str, n: int, *words: object) -> dict[str, Any]:
    """Run a script in n processes; the JSON that rank 0 has written to its --out."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [
            f"--nproc-per-node={n}",
            script,
            *map(str, words),
            "--out",
            str(out),
        ]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def end_worker(found: Any, out: Path) -> NoReturn:
    """Write what rank 0 has found, and end this process of `torchrun`."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # an orderly end has been seen to abort in torch's threads


def take_turns(
    script: str, n: int, names: Sequence[str], n_runs: int, *words: object
) -> dict[str, list[dict[str, Any]]]:
    """Run a script under ``--worker NAME`` for each name in turn, n_runs times."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(n_runs):
        for name in names:
            found[name].append(torchrun(script, n, *words, "--worker", name))
            print(name, found[name][-1], file=sys.stderr, flush=True)
    return found
