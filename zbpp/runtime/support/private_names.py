"""The names of torch that it does not document, and what a torch without them does.

`autograd_internals`, `torch_internals` and `compile_internals` use them, each with a
fallback, so that a torch without a name is slower or splits less, and is not wrong.
(Those of FSDP, without which nothing is sharded, are in `fsdp_internals`.)
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["PRIVATE_NAMES", "PrivateName", "missing_names"]


class PrivateName(NamedTuple):
    """A name that may change with any release.

    Args:
        path: module and attributes, with dots.
        seen: versions of torch that have it.
        without: what becomes of zbpp where it is gone.
    """

    path: str
    seen: str
    without: str


_AT_LEAST = "2.9 to 2.13"
_LATEST = "2.13"
_ALL_IN_B = "products of such nodes run wholly in B"
_NOT_SPLIT = "compiled regions run wholly in B, and reports name it"

PRIVATE_NAMES = (
    PrivateName(
        "torch.autograd._is_checkpoint_valid",
        _AT_LEAST,
        "the gradient by which torch's pipeline infers shapes is added too",
    ),
    PrivateName("torch._C._set_grad_enabled", _AT_LEAST, "torch's own, slower"),
    PrivateName(
        "torch.autograd.graph._engine_run_backward",
        _LATEST,
        "calls are checked, slower",
    ),
    PrivateName(
        "torch.autograd.Variable._execution_engine.run_backward",
        _LATEST,
        "calls prepare for threads of devices, slower",
    ),
    PrivateName(
        "torch.utils.hooks.RemovableHandle.next_id",
        _AT_LEAST,
        "every node is examined for hooks, and no plan is kept",
    ),
    PrivateName(
        "torch._C._autograd._get_sequence_nr",
        _LATEST,
        "every node is examined for hooks",
    ),
    PrivateName("torch.utils.checkpoint._Holder", _LATEST, _ALL_IN_B),
    PrivateName(
        "torch.autograd.graph.register_multi_grad_hook",
        _AT_LEAST,
        "(its inner functions') such a hook fires once in B and once in W",
    ),
    PrivateName(
        "torch.autograd.profiler._is_profiler_enabled",
        _AT_LEAST,
        "ranges are recorded without a profiler too, slower",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensor",
        _AT_LEAST,
        "estimates count weight gradients to B",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        _AT_LEAST,
        "models that are cut at their blocks are not estimated",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeCopyMode",
        _LATEST,
        "models on the meta device cannot be copied for an estimate",
    ),
    PrivateName(
        "torch.utils._pytree.SUPPORTED_NODES",
        _AT_LEAST,
        "zbpp.runtime does not load",
    ),
    PrivateName(
        "torch.distributed._composable.contract._get_registry",
        _LATEST,
        "modules that `replicate` wraps are not refused",
    ),
    PrivateName(
        "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
        _LATEST,
        "a DistributedDataParallel around a split forward is not refused",
    ),
    PrivateName(
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        _AT_LEAST,
        "steps are taken to have hooks, slower",
    ),
    PrivateName(
        "torch.optim.optimizer._global_optimizer_post_hooks",
        _AT_LEAST,
        "steps are taken to have hooks, slower",
    ),
    PrivateName("torch._C._current_autograd_node", _LATEST, _NOT_SPLIT),
    PrivateName("torch._inductor.compile_fx.compile_fx", _LATEST, _NOT_SPLIT),
    PrivateName("torch._inductor.compile_fx.compile_fx_inner", _LATEST, _NOT_SPLIT),
    PrivateName("torch._functorch.config.patch", _LATEST, _NOT_SPLIT),
    PrivateName(
        "torch._functorch.config.force_non_lazy_backward_lowering", _LATEST, _NOT_SPLIT
    ),
    PrivateName("torch._functorch.config.enable_autograd_cache", _LATEST, _NOT_SPLIT),
    PrivateName(
        "torch._TorchCompileInductorWrapper", _LATEST, "torch.compile(mode=) fails"
    ),
    PrivateName(
        "torch._dynamo.exc.TorchDynamoException",
        _LATEST,
        "an estimate fails at a layer that takes several graphs",
    ),
)
"""Beside these there are attributes of nodes: what a kind of product saves
(``_saved_*``, ``_raw_saved_*``: without them it runs in B), ``_sequence_nr``, and of
nodes of compiled regions ``_forward_cls.compiled_bw`` and ``maybe_subclass_metadata``;
see their functions."""


def missing_names() -> Sequence[PrivateName]:
    """Return the names that this torch lacks."""
    return [name for name in PRIVATE_NAMES if not _exists(name.path)]


def _exists(path: str) -> bool:
    """Import the longest part of a path that is a module, and look the rest up."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for part in parts[n:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False
