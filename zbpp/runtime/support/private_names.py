"""The undocumented names of torch that this package uses, and a check for them.

Each use has a fallback: without a name zbpp is slower or splits less, and is not wrong.
(Without those of FSDP nothing is sharded; `fsdp` checks them.) `backward.self_check`
compares a small split backward with a plain one.
"""

import pkgutil
import warnings

PRIVATE_NAMES = (
    "torch:_TorchCompileInductorWrapper",
    "torch._C:_current_autograd_node",
    "torch._functorch.config:bundled_autograd_cache",
    "torch._functorch.config:enable_autograd_cache",
    "torch._functorch.config:enable_remote_autograd_cache",
    "torch._functorch.config:force_autograd_cache",
    "torch._functorch.config:force_non_lazy_backward_lowering",
    "torch._functorch.config:patch",
    "torch._inductor.compile_fx:compile_fx",
    "torch._inductor.compile_fx:compile_fx_inner",
    "torch._subclasses.fake_tensor:FakeCopyMode",
    "torch._subclasses.fake_tensor:FakeTensor",
    "torch.export.unflatten:InterpreterModule",
    "torch.autograd:_is_checkpoint_valid",
    "torch.autograd.graph:_engine_run_backward",
    "torch.autograd.profiler:_is_profiler_enabled",
    "torch.distributed._composable.contract:_get_registry",
    "torch.distributed.device_mesh:DeviceMesh._concatenate",
    "torch.distributed.device_mesh:DeviceMesh._flatten",
    "torch.nn.parallel:DistributedDataParallel._active_ddp_module",
    "torch.optim.optimizer:_global_optimizer_post_hooks",
    "torch.optim.optimizer:_global_optimizer_pre_hooks",
    "torch.utils._pytree:SUPPORTED_NODES",
    "torch.utils.hooks:RemovableHandle.next_id",
)


def missing_names() -> list[str]:
    """Return the names that this torch lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # imports of torch's compiler
        return [name for name in PRIVATE_NAMES if not _exists(name)]


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
