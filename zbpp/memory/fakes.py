"""Models and batches without data: tensors that have sizes, dtypes and devices only.

torch's `FakeTensorMode` runs the shape functions of its operators, for the kernels of
one device. The meta device would choose others, for attention and under autocast.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode

from zbpp.core import RequestError
from zbpp.models import Layered
from zbpp.runtime.support.collectives import groups_kept
from zbpp.runtime.support.devices import is_missing
from zbpp.runtime.support.pytree import map_tensors, tensors_in


@dataclass(frozen=True)
class FakeModel:
    """All layers of a model and one micro-batch, as fake tensors of one mode.

    Args:
        mode: of the tensors; enter it to compute with them.
        layers: of the whole model, in order.
        inputs: of the first layer.
        targets: of the loss; None if the last layer puts it out.
        device: whose kernels are taken.
    """

    mode: FakeTensorMode
    layers: list[nn.Module]
    inputs: Any
    targets: Any
    device: torch.device

    def of_size(self, samples: int | None) -> "FakeModel":
        """The same model with another number of samples."""
        if samples is None:
            return self
        old = self.samples

        def resize(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != old:
                return tensor
            return tensor.new_empty((samples, *tensor.shape[1:]))

        with self.mode:
            inputs, targets = (
                map_tensors(part, resize) for part in (self.inputs, self.targets)
            )
        return replace(self, inputs=inputs, targets=targets)

    @property
    def samples(self) -> int:
        """Samples of the micro-batch."""
        sizes = (int(x.shape[0]) for x in tensors_in(self.inputs) if x.dim())
        return next(sizes, 1)


def check_device(device: torch.device) -> None:
    """Refuse a device on which autograd cannot run fake tensors.

    Seen in CUDA builds of torch 2.11 and 2.13: without a GPU, a backward of fake CUDA
    tensors ends in autograd's engine.

    Raises:
        RequestError: an accelerator that is not there.
    """
    if is_missing(device):
        raise RequestError(
            f"torch finds no {device.type} device, so the memory of its kernels is "
            "unknown; estimate with --device cpu, or on a machine with such a device "
            "(it is not used)"
        )


@contextmanager
def building() -> Iterator[None]:
    """Within this a model is made on the meta device, and stays there if moved."""
    with torch.device("meta"), _StaysOnMeta():
        yield


class _StaysOnMeta(TorchFunctionMode):
    """Moves of tensors on meta change their dtype alone: they have no data to copy."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (Tensor.to, Tensor.cuda, Tensor.cpu) and args[0].is_meta:
            how = [*args[1:], *kwargs.values()]
            dtypes = [x.dtype if isinstance(x, Tensor) else x for x in how]
            return args[0].to("meta", *(x for x in dtypes if type(x) is torch.dtype))
        return function(*args, **kwargs)


@contextmanager
def reading_fakes() -> Iterator[None]:
    """Within this, transformers treats fake tensors as real ones.

    By itself it takes them for those of a compiler, whose numbers cannot be read, and
    makes masks, and repeats keys and values, that a run does without.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        yield
        return
    before = module.is_fake_tensor
    module.is_fake_tensor = lambda _: False
    try:
        yield
    finally:
        module.is_fake_tensor = before


def fake_model(
    layered: Layered, inputs: Any, targets: Any, *, device: torch.device
) -> FakeModel:
    """Copy a model and a micro-batch without their data; they stay as they are.

    A builder is called for all layers at once, and makes none of its weights.
    """
    check_device(device)
    with building():
        layers = nn.ModuleList(layered.build(range(layered.n_layers)))
    fakes: Any = _Fakes(device)
    with FakeCopyMode(fakes):
        layers = copy.deepcopy(layers, groups_kept(layers))
    inputs, targets = (map_tensors(x, fakes.from_tensor) for x in (inputs, targets))
    return FakeModel(fakes.mode, list(layers), inputs, targets, device)


class _Fakes:
    """Makes fake tensors of one mode and device; `FakeCopyMode` asks it in a copy."""

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device

    def from_tensor(self, tensor: Tensor, **_: Any) -> Tensor:
        """Return a tensor of the same sizes."""
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        if not is_plain or tensor.layout is not torch.strided:
            return self.mode.from_tensor(tensor)
        with self.mode:
            return torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=tensor.dtype,
                device=self._device,
                requires_grad=tensor.requires_grad,
            )
