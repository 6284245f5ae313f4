"""``zbpp doctor``: the installation, or the weight gradients of a model."""

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.table import Table

from zbpp.cli.outputs import Terminal
from zbpp.core import RequestError
from zbpp.training.options import HF, ModelName, Switch
from zbpp.training.user_model import call_builder, load_model

_TESTED = {"python": ("3.11", "3.12", "3.13"), "torch": ("2.13", "2.14", "2.15")}
"""Releases that the tests have passed on; 3.12 without torch."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Print versions, devices and backends, and what is missing; or examine a model:
    which of its weight gradients can wait for W, and why the others cannot.
    """

    model: ModelName | None = None
    """A function that returns a module and its inputs; or hf:config.json."""
    compile: Switch = False
    """Examine the model compiled, block by block."""

    def run(self, words: Sequence[str]) -> None:
        """Print one fact a line, or a table of parameters."""
        if self.model is None:
            for name, text in _facts():
                print(f"{name:14} {text}")
            return
        rows, summary = _examine(self.model, compile=self.compile)
        table = Table("parameter", "shape", "gradient computed in")
        for row in rows:
            table.add_row(*row)
        Terminal(highlight=False).print(table)
        print(summary)


def _facts() -> Iterator[tuple[str, str]]:
    """Describe the installation, a name and a text each; works without torch."""
    yield "zbpp", _version("zbpp") or "not installed: running from a folder"
    python = f"{platform.python_version()} ({sys.executable}){_tested('python')}"
    yield "python", python
    yield "system", f"{platform.system()} {platform.machine()}"
    yield "CPU cores", f"{_usable_cores()} usable of {os.cpu_count()}"
    for package in ("numpy", "rich"):
        yield package, _version(package) or "missing: reinstall zbpp"
    yield "matplotlib", _version("matplotlib") or "missing: pip install 'zbpp[viz]'"
    if _version("torch") is None:
        yield "torch", "missing: pip install 'zbpp[train]'"
    else:
        yield from _torch_facts()


def _torch_facts() -> Iterator[tuple[str, str]]:
    try:
        import torch
        from torch import distributed

        from zbpp.runtime.support.devices import accelerator, built_for
        from zbpp.runtime.support.private_names import missing_names
    except (ImportError, OSError) as error:
        yield "torch", f"{_version('torch')} cannot be loaded: {error}"
        return
    yield "torch", f"{torch.__version__} ({_build(torch.version)}){_tested('torch')}"
    yield "torch threads", str(torch.get_num_threads())
    yield "split backward", _split()
    if missing := missing_names():
        text = f"this torch lacks {', '.join(missing)}; some passes are slower or whole"
        yield "torch internals", text
    kind = accelerator()
    if kind is None:
        why = f"no {built_for()} device visible"
        none = "none: torch is built for CPUs"
        yield "accelerator", why if built_for() else none
    for index in range(torch.accelerator.device_count() if kind else 0):
        about = torch.get_device_module(kind).get_device_properties(index)
        yield f"{kind} {index}", f"{about.name}, {about.total_memory / 2**30:.1f} GiB"
    if not distributed.is_available():
        yield "backends", "none: this torch cannot train distributed"
        return
    if kind is not None:
        backend = distributed.get_default_backend_for_device(kind)
        yield "accelerator", f"{kind}, its messages by {backend}"
    names = ["gloo", "nccl", "xccl", *map(str.lower, distributed.Backend._plugins)]
    backends = [name for name in names if distributed.is_backend_available(name)]
    yield "backends", ", ".join(backends) or "none"


def _split() -> str:
    """Try to split a backward, and return the result in words."""
    from zbpp.runtime.backward.self_check import check_split

    try:
        check_split()
    except RequestError as error:
        return f"wrong: {error}"
    return "tried: equal to a plain backward, to the bit"


def _tested(name: str) -> str:
    """The words behind a line whose release no test has run on."""
    release = platform.python_version() if name == "python" else _version(name) or ""
    if ".".join(release.split(".")[:2]) in _TESTED[name]:
        return ""
    return f"; not tested: {', '.join(_TESTED[name])} are"


def _build(version: Any) -> str:
    for name, of in {"CUDA": "cuda", "ROCm": "hip", "XPU": "xpu"}.items():
        if getattr(version, of, None):
            return f"{name} {getattr(version, of)}"
    return "CPU only"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _module_and_inputs(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A plain module with its inputs, or all layers of a model and their input."""
    from torch import nn

    from zbpp.models.hugging_face import is_pretrained

    built = None if name.startswith(HF) else call_builder(name)
    if isinstance(built, tuple) and len(built) in (2, 3):
        model, batch = built[:2]
        is_plain = isinstance(model, nn.Module) and not is_pretrained(model)
        if is_plain and not isinstance(model, nn.Sequential | nn.ModuleList):
            inputs = batch if len(built) == 2 else batch[0]
            return model, inputs if isinstance(inputs, tuple) else (inputs,)
    user = load_model(name)
    return nn.Sequential(*user.layered.build(range(user.n_layers))), (user.inputs,)


def _examine(
    name: str, *, compile: bool = False
) -> tuple[list[tuple[str, str, str]], str]:
    """Run one forward: a row for each parameter, and the share that W computes."""
    from zbpp.diagnostics import summarize_split
    from zbpp.runtime.backward.split import split_forward

    module, inputs = _module_and_inputs(name)
    run = _compiled(module) if compile else module
    report = split_forward(run, *inputs).report()
    rows, where, sizes = [], {}, {}
    for path, p in module.named_parameters():
        if p in report:
            where[path], sizes[path] = report[p], p.numel()
        text = report.get(p, "frozen" if not p.requires_grad else "unused")
        rows.append((path, " x ".join(map(str, p.shape)), text))
    if not where:
        raise RequestError(f"--model {name}: no parameter gets a gradient")
    return rows, summarize_split(where, sizes)


def _compiled(module: Any) -> Callable[..., Any]:
    from torch import nn

    from zbpp.runtime.chunk import Chunk
    from zbpp.runtime.compiled.backend import compiled
    from zbpp.runtime.driver.build import compiled_chunk

    if not isinstance(module, nn.Sequential):
        return compiled(module)
    chunk = compiled_chunk(Chunk(0, 0, tuple(module)), "blocks")
    return lambda value: chunk.run(value, {}, None)
