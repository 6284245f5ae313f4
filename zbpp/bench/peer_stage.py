"""Chunks of a model as torch's pipeline stages take them: tensors in, tensors out.

torch's stages hand on tensors and tuples of tensors. A value with more structure
(dicts, None) is taken apart at the end of a chunk and put together at the start of the
next; its structure is learned by one forward over all chunks, before torch sees any.
torch is told the sizes too: to find them, it would run layers on arbitrary numbers.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.core import Placement
from zbpp.runtime.support.collectives import wire_of
from zbpp.runtime.values import (
    Nested,
    Structure,
    Tensors,
    as_tensors,
    as_value,
    nested,
)

__all__ = ["PeerChunk", "learn_structures"]


class PeerChunk(nn.Module):
    """Layers in a row, called with the tensors of a value.

    Args:
        layers: of the chunk.
        first: global index of the first one.
        device: where they compute.
        autocast: compute dtype of the forward, or None.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).to(device)
        self.first = first
        self.takes: Structure | None = None
        """Structure of the inputs."""
        self.puts: Structure | None = None
        """Structure of the outputs."""
        self.sizes: dict[str, Tensors] = {}
        """Inputs and outputs of a micro-batch, without data; as a stage takes them."""
        self._device, self._autocast = device, autocast

    def context(self) -> AbstractContextManager[object]:
        """Within this, the layers and the loss compute."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def run(self, tensors: Tensors) -> Tensors:
        """Run the layers; the outputs as they travel."""
        value: Any = as_value(_with(tensors, self.takes))
        with self.context():
            for layer in self.layers:
                value = layer(value)
        return as_tensors(value)

    def forward(self, *tensors: Tensor) -> Tensor | Tensors:
        """Run the layers on the tensors of their inputs."""
        outputs = self.run(tensors)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def value_of(self, outputs: Tensor | Tensors) -> Any:
        """Put together what the layers have put out, for the loss."""
        tensors = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        return as_value(_with(tensors, self.puts))

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by the parameters' names in the whole model."""
        return {
            name: p.grad
            for index, layer in enumerate(self.layers, start=self.first)
            for name, p in layer.named_parameters(prefix=f"layers.{index}")
            if p.grad is not None
        }


def learn_structures(
    chunks: Mapping[int, PeerChunk],
    placement: Placement,
    inputs: Any,
    device: torch.device,
) -> None:
    """Run one micro-batch forward through all chunks (every rank must call).

    Args:
        chunks: of this process.
        placement: of all chunks.
        inputs: of the micro-batch, as the first layer takes it.
        device: of this process.
    """
    message: list[Any] = [_told(as_tensors(inputs))]
    for index, stage in enumerate(placement.stage_of):
        chunk = chunks.get(index)
        if chunk is not None:
            structure, tensors = message[0]
            chunk.takes = structure
            outputs = chunk.run(tuple(_on(tensor, device) for tensor in tensors))
            message = [_told(outputs)]
            chunk.puts = message[0][0]
            sizes = {"input_args": tensors, "output_args": message[0][1]}
            chunk.sizes = {
                name: tuple(_empty(tensor) for tensor in them)
                for name, them in sizes.items()
            }
        dist.broadcast_object_list(
            message, src=stage, device=wire_of(dist.get_backend(), device)
        )


def _told(tensors: Tensors) -> tuple[Structure | None, Tensors]:
    structure = tensors.structure if isinstance(tensors, Nested) else None
    return structure, tuple(
        tensor.detach().cpu().requires_grad_(tensor.requires_grad) for tensor in tensors
    )


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _empty(tensor: Tensor) -> Tensor:
    meta = torch.empty_like(tensor, device="meta")
    return meta.requires_grad_(tensor.requires_grad)


def _with(tensors: Tensors, structure: Structure | None) -> Tensors:
    return tensors if structure is None else nested(tensors, structure)
