"""Versions and devices of the machine; what is missing, and how to get it."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["report_lines"]

_EXTRA_OF = {"torch": "train", "matplotlib": "viz"}


def report_lines() -> list[str]:
    """Describe the installation, one fact a line; works without torch."""
    lines = [
        _line("zbpp", _version("zbpp") or "not installed: running from a folder"),
        _line("python", f"{platform.python_version()} ({sys.executable})"),
        _line("system", f"{platform.system()} {platform.machine()}"),
        _line("CPU cores", f"{_usable_cores()} usable of {os.cpu_count()}"),
    ]
    for package in ("numpy", "networkx", "rich", "tyro"):
        lines.append(_line(package, _version(package) or "missing: reinstall zbpp"))
    lines.append(_line("matplotlib", _version("matplotlib") or _missing("matplotlib")))
    return lines + _torch_lines()


def _torch_lines() -> list[str]:
    if _version("torch") is None:
        return [_line("torch", _missing("torch"))]
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError) as error:
        return [_line("torch", f"{_version('torch')} cannot be loaded: {error}")]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    lines = [
        _line("torch", f"{torch.__version__} ({build})"),
        _line("torch threads", str(torch.get_num_threads())),
    ]
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(n_devices):
        device = torch.cuda.get_device_properties(index)
        lines.append(
            _line(
                f"GPU {index}", f"{device.name}, {device.total_memory / 2**30:.1f} GiB"
            )
        )
    if not n_devices:
        why = "none visible" if torch.version.cuda else "none: torch is built for CPUs"
        lines.append(_line("GPUs", why))
    if not distributed.is_available():
        return [*lines, _line("backends", "none: this torch cannot train distributed")]
    backends = [
        name
        for name, available in (
            ("gloo", distributed.is_gloo_available()),
            ("nccl", distributed.is_nccl_available()),
        )
        if available
    ]
    return [*lines, _line("backends", ", ".join(backends) or "neither gloo nor nccl")]


def _line(name: str, text: str) -> str:
    return f"{name:14} {text}"


def _missing(package: str) -> str:
    return f"missing: pip install 'zbpp[{_EXTRA_OF[package]}]'"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
