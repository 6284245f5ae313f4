"""Release the initial weights of layers that other processes train.

Nothing updates them here: to read them after a step would be to read stale values.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import nn

from zbpp.core import RequestError

__all__ = ["release"]


class _Released:
    """A hook that refuses the use of a module; so does a copy or pickle of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any) -> NoReturn:
        raise RequestError(
            f"{self._name} is trained by another process, and zbpp.Pipeline has "
            "released its initial weights here: pipeline.save(folder) on every rank "
            "writes the whole model, and zbpp.checkpoint.load(folder, new_model) loads "
            "it into a plain one; pipeline.evaluate and pipeline.predict run it"
        )

    def __reduce__(self) -> NoReturn:
        self()


def release(parts: Mapping[str, nn.Module], layers: Iterable[nn.Module]) -> None:
    """Move what no layer of this process uses to the meta device, and refuse its use.

    Args:
        parts: of the whole model, by name.
        layers: of this process.
    """
    modules = dict.fromkeys(m for layer in layers for m in layer.modules())
    used = {
        id(tensor)
        for module in modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
    }
    for name, part in parts.items():
        refuse = _Released(name)
        for module in part.modules():
            if module not in modules and _empty(module, used):
                module.register_forward_pre_hook(refuse)
                hooked: Any = module  # torch has no type for this method
                hooked.register_state_dict_pre_hook(refuse)


def _empty(module: nn.Module, used: set[int]) -> bool:
    """Move a module's tensors to the meta device; True if there were any."""
    moved = False
    homes: tuple[dict[str, Any], ...] = module._parameters, module._buffers
    for tensors in homes:
        for key, tensor in tensors.items():
            if tensor is not None and id(tensor) not in used and not tensor.is_meta:
                meta = tensor.detach().to("meta")
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
                tensors[key] = meta
                moved = True
    return moved
