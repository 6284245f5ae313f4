"""Private functions and attributes of torch; see `private_names`."""

import importlib
import sys
from typing import Any, cast

import torch
import torch.autograd.graph
import torch.autograd.profiler
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.fx import GraphModule

try:
    from torch.distributed._composable.contract import _get_registry
except ImportError:
    _get_registry = None  # type: ignore[assignment]


def profiling() -> bool:
    """True while a profiler records; a range costs some 10 us even if none does."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


class _Arrived(torch.autograd.Function):
    """Waits for the result of a running collective."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


def arrived(tensor: Tensor) -> Tensor:
    """Wait for a collective that tensor parallelism has left running."""
    if not hasattr(tensor, "trigger_wait"):
        return tensor
    apply: Any = _Arrived.apply  # typed from torch 2.14 on
    return cast(Tensor, apply(tensor))


def inner_tensors(tensor: Tensor) -> list[Tensor] | None:
    """The tensors inside one of a library's class; None: a tensor of torch."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, _ = tensor.__tensor_flatten__()
    parts = (getattr(tensor, name) for name in names)  # a mesh may be among them
    return [part for part in parts if isinstance(part, Tensor)]


def is_fake(tensor: Tensor) -> bool:
    """True for a `FakeTensor`, which has sizes and no data, parameters included."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and type(tensor) is getattr(module, "FakeTensor", None)


_DATA_PARALLEL = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "ReplicateModule": "replicate",
}


def data_parallel(module: nn.Module) -> str | None:
    """The name of what shards or replicates a module over processes, if anything does.

    `fully_shard` adds a base class, `replicate` an entry in the module's registry of
    composable wrappers, and DistributedDataParallel notes itself while it runs.
    """
    for base in type(module).__mro__:
        if base.__name__ in _DATA_PARALLEL:
            return _DATA_PARALLEL[base.__name__]
    registry = _get_registry(module) if _get_registry is not None else None
    names = ("replicate", "fully_shard")
    return next((name for name in names if name in (registry or ())), None)


def is_in_ddp() -> bool:
    """True while a DistributedDataParallel forward runs around this call."""
    ddp = torch.nn.parallel.DistributedDataParallel
    return getattr(ddp, "_active_ddp_module", None) is not None


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step of this optimizer calls hooks."""
    module = importlib.import_module("torch.optim.optimizer")
    hooks = [
        *(getattr(module, f"_global_optimizer_{when}_hooks", None) for when in _WHEN),
        *(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in _WHEN),
    ]
    return any(hook is None or len(hook) > 0 for hook in hooks)


def has_plain_step(optimizer: torch.optim.Optimizer) -> bool:
    """True if its step is that of its class, and torch's wrapper around it is known.

    A learning-rate scheduler's wrapper only notes the call, and does not count.
    """
    replaced = vars(optimizer).get("step")
    return hasattr(type(optimizer).step, "hooked") and (
        replaced is None or hasattr(replaced, "_wrapped_by_lr_sched")
    )


_WHEN = ("pre", "post")


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Step without what torch wraps around every step: hooks and a profiler's range.

    Only for optimizers that have a plain step and no hooks.
    """
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def mark_called(optimizer: torch.optim.Optimizer) -> None:
    """Let a learning-rate scheduler know that a step was asked for before its step.

    The step itself comes later, and the scheduler would warn.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def use_generated_code(module: nn.Module) -> None:
    """Let modules of an exported graph run code; to interpret takes twice as long."""
    for part in module.modules():
        if hasattr(part, "_run_with_interpreter"):
            part._run_with_interpreter = False  # type: ignore[assignment]
            # its class has the code; its tensors would keep those of the part alive
            code = part.__dict__.get("graph_module")
            if code is not None:
                code._parameters, code._buffers, code._modules = {}, {}, {}


def run_graphs_on(module: nn.Module, device: torch.device) -> None:
    """Let an exported graph make its tensors on another device than at its export."""
    check = torch.ops.aten._assert_tensor_metadata.default

    def move(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    for part in module.modules():
        code: Any = part.__dict__.get("graph_module", part)
        if not isinstance(code, GraphModule):
            continue
        for node in list(code.graph.nodes):
            if node.target is check:
                code.graph.erase_node(node)
            else:
                node.args = tuple(move(x) for x in node.args)
                node.kwargs = {key: move(x) for key, x in node.kwargs.items()}
        code.recompile()
