"""A GPU day: all that is to be measured when there is a GPU, in less than 9 minutes.

    make gpu                                        all of it
    python benchmarks/gpu --only memory             a part
    make gpu-simulated                              a dry run: tiny sizes, no claims
    python benchmarks/gpu --device cpu --out DIR    another, on the CPU

    checks      tests marked gpu
    split       B + W against one full backward
    host        host time a job
    pipelines   2 and 4 stages on one GPU, measured beside simulated
    memory      estimates beside the allocator

Every part runs in a process of its own, as a fault of one leaves a GPU unusable to its
process, and within the time that is left. What it finds is written to
benchmarks/results/<device>_<date>/: README.md, and results.json beside it. The exit
code is 2 without a GPU, 1 if a part has failed.
"""

import argparse
import importlib
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu.look import is_real, look
from gpu.sizes import Sizes
from parts.table import markdown

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
PARTS = ("checks", "split", "host", "pipelines", "memory")


def main(args: Sequence[str]) -> int:
    """Run what is asked for; return the exit code."""
    asked = _parse(args)
    if asked.device == "cuda" and look() != 0:
        return 2
    device = torch.device(asked.device, 0 if asked.device == "cuda" else None)
    if asked.part is not None:
        asked.out.write_text(json.dumps(_measure(asked.part, device)))
        return 0
    deadline = time.monotonic() + 60 * asked.minutes
    found: dict[str, Any] = {}
    for part in asked.only or PARTS:
        print(f"{part} ...", flush=True)
        began = time.monotonic()
        try:
            if asked.one_process:
                found[part] = {"tables": _measure(part, device)}
            else:
                tables = _in_process(part, asked.device, deadline - began)
                found[part] = {"tables": tables}
        except (RuntimeError, AssertionError, OSError) as error:
            found[part] = {"failed": str(error)[-4000:]}
            print(f"{part} failed: {str(error)[-600:]}", flush=True)
        found[part]["seconds"] = time.monotonic() - began
    name = _device_name(device)
    day = datetime.now(UTC).date().isoformat()
    out = asked.out or HERE.parent / "results" / f"{_slug(name)}_{day}"
    _write(out, found, name, day, ["python", "benchmarks/gpu", *args])
    print(f"written to {out}")
    return int(any("failed" in part for part in found.values()))


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--one_process", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(args)


def _measure(part: str, device: torch.device) -> list[dict[str, Any]]:
    """Tables of one part, measured here."""
    sizes = Sizes(device, is_tiny=not is_real(device))
    if sizes.is_tiny:
        torch.set_num_threads(1)
    measured = importlib.import_module(f"gpu.{part}").measure(sizes)
    return [table.as_json() for table in measured]


def _in_process(part: str, device: str, left_s: float) -> list[dict[str, Any]]:
    """Tables of one part, measured in a process of its own.

    Raises:
        RuntimeError: it has failed, or there is no time left for it.
    """
    if left_s <= 0:
        raise RuntimeError("not run: the time was up")
    file = HERE / f".{part}.json"
    command = [sys.executable, str(HERE), "--device", device, "--part", part]
    try:
        run = subprocess.run(
            [*command, "--out", str(file)],
            capture_output=True,
            text=True,
            timeout=left_s,
        )
        if run.returncode != 0:
            raise RuntimeError((run.stdout + run.stderr)[-4000:])
        found: list[dict[str, Any]] = json.loads(file.read_text())
        return found
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"ended after {left_s:.0f} s: the time was up") from None
    finally:
        file.unlink(missing_ok=True)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU"


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def _versions() -> dict[str, str | None]:
    try:
        own = version("zbpp")
    except PackageNotFoundError:
        own = "of a checkout"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    return {
        "zbpp": own,
        "commit": commit.stdout.strip() or None,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
    }


def _write(
    out: Path, found: dict[str, Any], name: str, day: str, command: list[str]
) -> None:
    """README.md and results.json."""
    out.mkdir(parents=True, exist_ok=True)
    versions = _versions()
    everything = {
        "device": name,
        "date": day,
        "command": shlex.join(command),
        "versions": versions,
        "parts": found,
    }
    (out / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
    is_dry = torch.version.cuda is None or ("--device" in command and "cpu" in command)
    told = ", ".join(f"{k} {v}" for k, v in versions.items() if v)
    lines = [
        f"# {name}, {day}",
        "",
        f"`{shlex.join(command)}`; {told}. All figures are in `results.json` too.",
        "",
    ]
    if is_dry:
        lines += ["**A dry run on a CPU with tiny sizes: it shows nothing.**", ""]
    for part, of_part in found.items():
        lines += [f"## {part}", "", f"{of_part['seconds']:.0f} s.", ""]
        if "failed" in of_part:
            lines += ["Failed:", "", "```text", of_part["failed"].strip(), "```", ""]
        lines += [markdown(table) for table in of_part.get("tables", ())]
    (out / "README.md").write_text("\n".join(lines).rstrip() + "\n")
