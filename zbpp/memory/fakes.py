"""Models and batches without data: tensors that have sizes, dtypes and devices only.

torch's `FakeTensorMode` runs the shape functions of its operators, for the kernels of
one device. The meta device would choose others, for attention and under autocast.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

from zbpp.core import RequestError
from zbpp.runtime.partition import Model, count_layers
from zbpp.runtime.support.collectives import groups_kept
from zbpp.runtime.support.devices import is_missing
from zbpp.runtime.support.pytree import map_tensors, tensors_in

__all__ = [
    "FakeModel",
    "building",
    "check_device",
    "fake_mode",
    "fake_model",
    "reading_fakes",
]


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

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of all layers."""
        return _tensors_of(self.layers)


def check_device(device: torch.device) -> None:
    """Refuse a device on which autograd cannot run fake tensors.

    Seen in CUDA builds of torch 2.11 and 2.13: without a GPU, a backward of fake CUDA
    tensors ends in autograd's engine.

    Raises:
        RequestError: an accelerator that is not there.
    """
    if is_missing(device):
        raise RequestError(
            f"torch finds no {device.type} device, so it cannot tell what kernels of "
            "one take; estimate with --device cpu, or on a machine with one (none of "
            "it is used)"
        )


def fake_mode() -> FakeTensorMode:
    """A new mode; real tensors that a model has made are taken as they are."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def building(mode: FakeTensorMode) -> Iterator[None]:
    """Within this a model is made of fake tensors, and may be cast and moved.

    torch swaps parameters that are cast, which it refuses for fake ones that are known
    elsewhere. Here modules get new ones; tied ones stay tied.
    """
    changed: dict[int, tuple[Tensor, Tensor]] = {}

    def change(old: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if id(old) in changed:
            return changed[id(old)][1]
        with torch.no_grad():
            new = function(old)
        if new is old:
            return old
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new.detach(), requires_grad=old.requires_grad)
        changed[id(old)] = old, new
        return new

    def apply(module: Any, function: Any, recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(function)
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = change(tensor, function)
        return module

    before: Any = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        with mode, warnings.catch_warnings():
            # of a deep copy, which looks at addresses
            warnings.filterwarnings("ignore", ".*data pointer of FakeTensor")
            yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


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
    model: Model,
    inputs: Any,
    targets: Any,
    *,
    n_layers: int | None = None,
    device: torch.device,
) -> FakeModel:
    """Copy a model and a micro-batch without their data; they stay as they are.

    A builder is called for all layers at once, and makes none of its weights. A model
    whose parameters are fake already is taken itself.

    Raises:
        RequestError: there are no layers to take.
    """
    check_device(device)
    n_layers = count_layers(model, n_layers)
    built: Sequence[nn.Module] | None = None
    if isinstance(model, nn.Sequential | nn.ModuleList | Sequence):
        built = list(model)
    parts = [*tensors_in((inputs, targets)), *_tensors_of(built or [])]
    fakes = [tensor for tensor in parts if isinstance(tensor, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else fake_mode()
    if built is None:
        with building(mode), FakeCopyMode(mode), torch.device(device):
            built = list(model(range(n_layers)))  # type: ignore[operator]
    with torch.no_grad():
        if any(not isinstance(t, FakeTensor) for t in _tensors_of(built)):
            real = nn.ModuleList(built)
            with FakeCopyMode(mode):
                built = list(copy.deepcopy(real, groups_kept(real)))
        layers = [_moved(layer, device, mode) for layer in built]

    def fake(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            tensor = mode.from_tensor(tensor)
        with mode:
            return tensor.to(device)

    inputs, targets = map_tensors(inputs, fake), map_tensors(targets, fake)
    return FakeModel(mode, layers, inputs, targets, device)


def _tensors_of(layers: Sequence[nn.Module]) -> list[Tensor]:
    return [
        tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())
    ]


def _moved(layer: nn.Module, device: torch.device, mode: FakeTensorMode) -> nn.Module:
    if any(t.device.type != device.type for t in _tensors_of([layer])):
        with building(mode):
            layer.to(device)
    return layer
