"""A simulated GPU, in the place that a CPU build of torch leaves empty for CUDA.

It must be loaded before torch, so it is for separate processes, which find
`everywhere/` on their path first: `make test-simgpu`. In the order of
reading: `device/sim.h` (streams, events, memory, the checker for races),
`device/kernels.cpp` (the CPU's kernels, later), `device/module.cpp` (a simulated NCCL),
`cuda.py` (torch.cuda on top), `jobs.py` (reports name zbpp's jobs).

What it finds: accesses that nothing orders, memory handed out too early, host reads and
writes of pinned memory under way, waits of the host, leaks, circles of waits. What it
cannot show: speed, kernels of GPUs, and NCCL's buffers.
"""

import ctypes
import gc
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simgpu.build import built, torch_folder

if "torch" in sys.modules:
    raise ImportError("simgpu takes the place of CUDA: import it before torch")

_folder: Path = built()
_libraries = torch_folder() / "lib"
for _path in (
    _libraries / "libc10.so",
    _libraries / "libtorch_cpu.so",
    _folder / "libsimgpu.so",
):
    ctypes.CDLL(str(_path), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402

torch.set_num_threads(1)  # the bits of a sum depend on how many share it

_spec = importlib.util.spec_from_file_location("_simgpu", _folder / "_simgpu.so")
assert _spec is not None and _spec.loader is not None
native: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)

from simgpu import cuda  # noqa: E402

cuda.install(native)

__all__ = [
    "DEVICE",
    "POLICIES",
    "begin",
    "counts",
    "digest",
    "live",
    "native",
    "reports",
    "use_processes",
    "waits",
    "waits_since",
]

DEVICE = torch.device("cuda", 0)
POLICIES = {"lazy": 0, "random": 1, "eager": 2}


def begin(policy: str = "lazy", seed: int = 0, **settings: float) -> None:
    """Wait for all that is under way, forget what was found, and begin anew.

    Args:
        policy: when operations run: "lazy", when somebody must wait for them; "random";
            "eager", at once, as in a simulation that knows no streams.
        seed: of the policy, and of what the host is told by events.
        settings: others: ``queues``, ``n_streams``, ``n_running``, ``patience_s``, ...
    """
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()  # modules stay; looking them through costs more than most runs
    native.synchronize()
    native.configure("policy", POLICIES[policy])
    for name, value in settings.items():
        native.configure(name, value)
    native.begin(seed)


reports: Callable[[], list[str]] = native.reports
"""What was done wrong, in words: both accesses, jobs, streams and lines."""
counts: Callable[[], dict[str, int]] = native.counts
"""Numbers of launches, queries, races and calls that block the host."""
waits: Callable[[], dict[tuple[str, str, str], int]] = native.waits
"""How often the host has waited: for what, in which job, at which line."""
live: Callable[[], list[str]] = native.live
"""What is allocated: bytes, the job and the line."""
digest: Callable[[], int] = native.digest
"""A number for all that the host has launched, and was told when it asked."""


def waits_since(before: dict[tuple[str, str, str], int]) -> set[tuple[str, str, str]]:
    """Waits that `waits` lists now and did not list before, or fewer of them."""
    return {key for key, n in waits().items() if n > before.get(key, 0)}


def use_processes(folder: str, rank: int, n: int) -> None:
    """Put the simulated NCCL in the place of torch's; streams run by themselves now.

    Args:
        folder: where all processes put their messages, and their state when stuck.
        rank: of this process: it makes the device's name its own.
        n: how many processes there are.
    """
    native.use_processes(folder, rank, n)
    cuda.name_device(f"simulated-{rank}")
    cuda.install_nccl(native)
