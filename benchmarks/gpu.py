"""A GPU day: what only a GPU can show, in some minutes.

    make gpu PYTHON=python3                  # all of it
    python benchmarks/gpu.py tests split     # some of it

Each part is a command whose text goes to benchmarks/results/<device>_<date>/README.md
with device, versions and commit. The exit code is 2 without a GPU, 1 if a part failed.
"""

import argparse
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

try:
    import torch
except ModuleNotFoundError:
    print(f"gpu: {sys.executable} has no torch; see `make gpu PYTHON=...`")
    sys.exit(2)

HERE = Path(__file__).resolve().parent
BENCH = ["-m", "zbpp", "bench", "--device", "cuda", "--dtype", "bf16", "--size",
         "medium", "--seq", "1024", "--microbatch_size", "8", "--microbatches", "16",
         "--effort", "fast"]  # fmt: skip
PARTS = {
    # -P: not the zbpp of the checkout, which lacks its schedules; -W: another torch
    # than that of the other tests may warn of something else
    "tests": ["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default",
              "-m", "gpu", "tests/gpu"],
    "split": ["benchmarks/split.py", "--device", "cuda", "--runs", "15"],
    "bench": [*BENCH, "--modes", "1F1B,ZBH1,ZBH2,ZBV,auto", "--peers",
              "torch:1F1B,torch:InterleavedZeroBubble,torch:ZBVZeroBubble"],
}  # fmt: skip


def main() -> int:
    """Run the parts, and write what they print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--look", action="store_true", help="only look for a GPU")
    parser.add_argument("--out", type=Path, help="folder of the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu: torch finds no GPU here, so nothing is measured")
        return 2
    if args.look:
        return 0
    device, day = torch.cuda.get_device_name(), datetime.now(UTC).date().isoformat()
    name = "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
    out = args.out or HERE / "results" / f"{name}_{day}"
    out.mkdir(parents=True, exist_ok=True)
    command = ["git", "rev-parse", "--short", "HEAD"]
    git = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    n = torch.cuda.device_count()
    about = f"{n} x {device}, {day}, commit {git.stdout.strip() or 'unknown'}, torch "
    about += f"{torch.__version__}, CUDA {torch.version.cuda}, Python "
    lines, failed = [f"# {about}{platform.python_version()}"], False
    for part in args.parts or PARTS:
        words = [*PARTS[part]]
        if part == "bench":
            if n < 2:  # NCCL wants a GPU for each process
                lines += [f"## {part}", "Not run: it needs two GPUs."]
                continue
            words += ["--stages", str(n), "--out", str(out / "bench")]
        print(f"{part} ...", flush=True)
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, *words], cwd=HERE.parent, capture_output=True, text=True
        )
        failed |= done.returncode != 0
        text = done.stdout if done.returncode == 0 else done.stdout + done.stderr
        seconds = f"`{' '.join(words)}`: exit code {done.returncode}, "
        lines += [f"## {part}", f"{seconds}{time.monotonic() - began:.0f} s"]
        lines.append(f"```text\n{text.strip()[-20000:]}\n```")
        (out / "README.md").write_text("\n\n".join(lines) + "\n")
    print(f"written to {out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
