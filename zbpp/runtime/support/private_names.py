"""The names of torch that it does not document, and what a torch without them does.

`autograd_internals`, `torch_internals` and `compile_internals` use them, each with a
fallback, so that a torch without a name is slower or splits less, and is not wrong.
(Those of FSDP, without which nothing is sharded, are checked where `fsdp` is used.)
`backward.self_check` compares a small split with a plain backward once a process.

Beside these there are attributes of nodes: what a kind of product saves (``_saved_*``,
``_raw_saved_*``: without them it runs in B), ``_sequence_nr``, and of nodes of compiled
regions ``_forward_cls.compiled_bw`` and ``maybe_subclass_metadata``.
"""

import pkgutil
from collections.abc import Sequence

__all__ = ["PRIVATE_NAMES", "missing_names"]

_NOT_SPLIT = "compiled regions run wholly in B, and reports name it"
_STEP_HOOKS = "steps are taken to have hooks, slower"

PRIVATE_NAMES = {
    # seen in torch 2.9 to 2.13
    "torch.autograd:_is_checkpoint_valid": (
        "the gradient by which torch's pipeline infers shapes is added too"
    ),
    "torch._C:_set_grad_enabled": "torch's own, slower",
    "torch.utils.hooks:RemovableHandle.next_id": (
        "every node is examined for hooks, and no plan is kept"
    ),
    "torch.autograd.graph:register_multi_grad_hook": (
        "(its inner functions') such a hook fires once in B and once in W"
    ),
    "torch.autograd.profiler:_is_profiler_enabled": (
        "ranges are recorded without a profiler too, slower"
    ),
    "torch._subclasses.fake_tensor:FakeTensor": "estimates count weight gradients to B",
    "torch._subclasses.fake_tensor:unset_fake_temporarily": (
        "models that are cut at their blocks are not estimated"
    ),
    "torch.utils._pytree:SUPPORTED_NODES": "zbpp.runtime does not load",
    "torch.optim.optimizer:_global_optimizer_pre_hooks": _STEP_HOOKS,
    "torch.optim.optimizer:_global_optimizer_post_hooks": _STEP_HOOKS,
    # seen in torch 2.13
    "torch.autograd.graph:_engine_run_backward": "calls are checked, slower",
    "torch.autograd:Variable._execution_engine.run_backward": (
        "calls prepare for threads of devices, slower"
    ),
    "torch._C._autograd:_get_sequence_nr": "every node is examined for hooks",
    "torch.utils.checkpoint:_Holder": "products of such nodes run wholly in B",
    "torch._subclasses.fake_tensor:FakeCopyMode": (
        "models on the meta device cannot be copied for an estimate"
    ),
    "torch.distributed._composable.contract:_get_registry": (
        "modules that `replicate` wraps are not refused"
    ),
    "torch.nn.parallel:DistributedDataParallel._active_ddp_module": (
        "a DistributedDataParallel around a split forward is not refused"
    ),
    "torch.distributed.device_mesh:DeviceMesh._flatten": (
        "nothing is dealt out over several dimensions of a mesh"
    ),
    "torch.distributed.device_mesh:DeviceMesh._concatenate": (
        "experts that are dealt out over replicas are not saved"
    ),
    "torch.distributed.tensor.placement_types:_StridedShard": (
        "experts that are dealt out over replicas are not saved"
    ),
    "torch._C:_current_autograd_node": _NOT_SPLIT,
    "torch._inductor.compile_fx:compile_fx": _NOT_SPLIT,
    "torch._inductor.compile_fx:compile_fx_inner": _NOT_SPLIT,
    "torch._functorch.config:patch": _NOT_SPLIT,
    "torch._functorch.config:force_non_lazy_backward_lowering": _NOT_SPLIT,
    "torch._functorch.config:enable_autograd_cache": _NOT_SPLIT,
    "torch:_TorchCompileInductorWrapper": "torch.compile(mode=) fails",
    "torch._dynamo.exc:TorchDynamoException": (
        "an estimate fails at a layer that takes several graphs"
    ),
}
"""By module and name, what becomes of zbpp where it is gone."""


def missing_names() -> Sequence[str]:
    """Return the names that this torch lacks."""
    return [name for name in PRIVATE_NAMES if not _exists(name)]


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
