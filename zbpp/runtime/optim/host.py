"""Parameters and optimizer state of a stage in host memory.

    device  .. 3W7 | 0B7 0W7 |        | O    |                 | 0F0     | 3F0 ..
    copies         | gradients of 3 | of 0 | | parameters of 0 | of 3    |
    host                                   | steps |

The optimizers step *masters* on the host, of 32 bits where parameters have 16.
Gradients of a chunk leave the device after their last sum, its parameters come before
its next F, both on a separate stream, from and to pinned memory. On CPUs the copies are
plain.

A rollback happens on the host; the parameters that have been copied in already are
copied in once more.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zbpp.runtime.stage import Stage
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.sharded import as_sharded, own_shard
from zbpp.runtime.support.streams import NetworkStream

_NARROW = torch.float16, torch.bfloat16


def master_dtype(p: Tensor) -> torch.dtype:
    """The dtype of the master of a parameter."""
    return torch.float32 if p.dtype in _NARROW else p.dtype


@torch.no_grad()
def make_master(p: nn.Parameter) -> nn.Parameter:
    """Make the master of a parameter."""
    numbers = own_shard(p.detach())
    master = as_sharded(_on_host(numbers, master_dtype(p)).copy_(numbers), p)
    return nn.Parameter(master, requires_grad=p.requires_grad)


def _on_host(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the numbers of a tensor; that of a GPU's is pinned, and pooled."""
    pins = runs_ahead(like.device)
    return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=pins)


class HostMasters:
    """Masters by parameter, if any, and the copies between both."""

    def __init__(self, masters: Mapping[Tensor, Tensor], stage: Stage) -> None:
        self.masters = masters
        self.parameter_of = {master: p for p, master in masters.items()}
        self.chunks = {
            index: [p for *_, p in chunk.all_stepped() if p in masters]
            for index, chunk in stage.chunks.items()
        }
        runs = bool(masters) and runs_ahead(stage.device)
        self._side = NetworkStream(stage.device) if runs else None
        self.gradients: dict[Tensor, Tensor] = {}
        """On the host, or on their way, by parameter."""
        self._stale: set[Tensor] = set()
        """Parameters whose masters are newer."""
        self._arrivals: dict[int, torch.Event] = {}
        self.may_differ = True
        """Others may have written to parameters."""

    @contextmanager
    def _copying(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Copies start after all kernels issued so far, and overlap with later ones."""
        if self._side is None:
            yield
            return
        self._side.begin(tensors)
        with self._side.stream:
            yield

    def wait(self) -> None:
        """Wait until no copy is under way."""
        if self._side is not None:
            self._side.stream.synchronize()

    # Gradients.

    @torch.no_grad()
    def copy_out(self, parameters: Iterable[Tensor]) -> None:
        """Begin to copy gradients that are complete."""
        gradients = {
            p: own_shard(p.grad)
            for p in parameters
            if p.grad is not None and p in self.masters
        }
        with self._copying(gradients.values()):
            for p, gradient in gradients.items():
                if gradient.layout is torch.strided:
                    copy = _on_host(gradient).copy_(gradient, non_blocking=True)
                else:
                    copy = gradient.to("cpu", copy=True)
                self.gradients[p] = copy

    @torch.no_grad()
    def deliver(self) -> None:
        """Give masters the gradients, and free those of the device."""
        self.wait()
        for p, gradient in self.gradients.items():
            master = self.masters[p]
            master.grad = as_sharded(gradient.to(master.dtype), master)
            p.grad = None
        self.gradients = {}

    # Parameters.

    def begin_step(self) -> None:
        """The masters will change; no copy of them may be under way."""
        self.wait()
        self._stale = set(self.masters)

    @torch.no_grad()
    def copy_in(self, chunk: int) -> None:
        """Begin to copy the parameters of a chunk whose masters have changed."""
        stale = [p for p in self.chunks[chunk] if p in self._stale]
        if not stale:
            return
        self._stale.difference_update(stale)
        numbers = [own_shard(p.detach()) for p in stale]
        with self._copying(numbers):
            for p, target in zip(stale, numbers, strict=True):
                source = own_shard(self.masters[p].detach())
                if source.dtype != target.dtype:
                    source = _on_host(target).copy_(source)
                target.copy_(source, non_blocking=True)
            if self._side is not None:
                self._arrivals[chunk] = torch.Event(target.device)
                self._arrivals[chunk].record()

    def arrive(self, chunk: int) -> None:
        """Let the current stream wait for the parameters of a chunk."""
        self.copy_in(chunk)
        event = self._arrivals.pop(chunk, None)
        if event is not None:
            event.wait()

    def arrive_all(self, *, may_differ: bool = False) -> None:
        """Let the current stream wait for all parameters; others may write to them."""
        for chunk in self.chunks:
            self.arrive(chunk)
        self.may_differ |= may_differ

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over what others have written to parameters meanwhile, if they may."""
        if not self.may_differ:
            return
        self.may_differ = False
        for p, master in self.masters.items():
            numbers, here = own_shard(p.detach()).cpu(), own_shard(master.detach())
            if numbers.dtype != here.dtype:  # what is rounded alike is the same
                is_same = here.to(numbers.dtype) == numbers
                numbers = torch.where(is_same, here, numbers.to(here.dtype))
            here.copy_(numbers)
