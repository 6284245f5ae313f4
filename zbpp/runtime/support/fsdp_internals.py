"""The names of `fully_shard` and `replicate` that torch does not document.

No other file touches them, but `fsdp_in_place` what its collectives are called with,
and `fsdp_sums` and `fsdp_widening` parameters that are given to them.
Torch gives no public way to reduce a module's gradients at a time of one's own, nor to
leave out its prefetches. `check` refuses a torch that lacks one of the names: a part of
the work would be left out without a word.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.support.fsdp_in_place import InPlace, aligned
from zbpp.runtime.support.fsdp_sums import PartSums, fill_unused
from zbpp.runtime.support.fsdp_widening import WIDENED, Widening
from zbpp.runtime.support.sharded import is_sharded

__all__ = ["Reduces", "Unit", "is_unit", "managed", "units_in"]

_STATE = ("_lazy_init", "_fsdp_param_groups", "_comm_ctx")
_GROUP = (
    *("post_backward", "finalize_backward", "fsdp_params", "reduce_grads"),
    "all_reduce_grads",
    *("_all_gather_result", "_reshard_after_forward", "mesh_info", "device"),
)
_CONTEXT = ("post_forward_order", "reduce_scatter_states")
_PARAMETER = (
    *("_unsharded_param", "all_gather_outputs", "reduce_dtype", "sharded_param"),
    *("alloc_all_gather_outputs", "free_unsharded_param", "_orig_size"),
    *("_contiguous_orig_stride", "fsdp_placement", "sharded_size"),
    *("contiguous_sharded_stride", "padded_sharded_param_size", "to_sharded_dtensor"),
)


class _NoOrder(list[Any]):
    """An order of forwards that nothing can be prefetched by.

    It runs over all modules that share streams, which a pipeline interleaves: by it a
    backward gathers modules that no job waits for, and the next step would compute
    with what they were before the optimizer.
    """

    def append(self, _: Any) -> None:
        """Forget it."""


class Reduces(Protocol):
    """Sums gradients of a module."""

    def reduce(self) -> list[nn.Parameter]:
        """Start to sum them; return the parameters that have none here."""

    def finish(self) -> None:
        """Have what was started."""


class Unit:
    """A module that `fully_shard` or `replicate` has wrapped.

    Args:
        module: the wrapped one.

    Raises:
        RequestError: this torch has other names than those that were seen in 2.13.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = cast(Any, module)
        self._state: Any = self.module._get_fsdp_state()
        self._state._lazy_init()
        _check(self._state, _STATE)
        self._groups: Sequence[Any] = self._state._fsdp_param_groups
        self._context = self._state._comm_ctx
        self._reduces: Reduces | None = None
        _check(self._context, _CONTEXT)
        for group in self._groups:
            _check(group, _GROUP)
        for one in self._parameters:
            _check(one, WIDENED)
        self.widening = Widening(self._parameters)
        """Of its gradients."""

    def begin(self, *, keeps: bool) -> None:
        """Leave all collectives but the gathers of passes to jobs; once.

        Args:
            keeps: what a job has gathered stays until another ends it.
        """
        self._context.post_forward_order = _NoOrder()
        module = self.module
        module.set_is_last_backward(False)
        module.set_requires_gradient_sync(False, recurse=False)
        # Sums, as the losses have shares in that of all replicas.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_backward(not keeps, recurse=False)
        self.widening.take_over()

    @property
    def gathers_by_itself(self) -> bool:
        """True if each pass gathers it, and drops it at its end."""
        return any(group._reshard_after_forward for group in self._groups)

    def gather(self) -> None:
        """Start to gather the parameters; the first pass waits for them."""
        self.module.unshard(async_op=True)

    def drop(self) -> None:
        """Drop what was gathered, also if it is under way."""
        for group in self._groups:
            if group._all_gather_result is not None:
                group.wait_for_unshard()
        self.module.reshard()

    def reduce(self) -> list[nn.Parameter]:
        """Start to reduce the gradients.

        Returns:
            The parameters that have none here, and count with zeros.
        """
        if self._reduces is not None:
            return self._reduces.reduce()
        self.widening.add()
        unused = fill_unused(self._parameters)
        for group in self._groups:
            group.reduce_grads = group.all_reduce_grads = True
            group.post_backward()
            group.reduce_grads = group.all_reduce_grads = False
        return unused

    def wait(self) -> None:
        """Let what comes next wait for the reduced gradients."""
        if self._reduces is not None:
            self._reduces.finish()
        for group in self._groups:
            group.finalize_backward()
        states = self._context.reduce_scatter_states
        while states:
            event = states.pop().event
            if event is not None:
                torch.accelerator.current_stream().wait_event(event)

    def leaves(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """The forwards' leaves, and the parameter with this process's part of each.

        Raises:
            RequestError: the parameters were never gathered.
        """
        for group in self._groups:
            for one in group.fsdp_params:
                _check(one, ("_unsharded_param", "sharded_param"))
                yield one._unsharded_param, one.sharded_param

    @property
    def device(self) -> torch.device:
        """The device that it is gathered on."""
        device: torch.device = self._groups[0].device
        return device

    @property
    def trains(self) -> bool:
        """True if a parameter is not frozen."""
        return any(one.sharded_param.requires_grad for one in self._parameters)

    @property
    def _parameters(self) -> Iterator[Any]:
        for group in self._groups:
            yield from group.fsdp_params

    def whole_bytes(self) -> tuple[int, int]:
        """Bytes of its parameters in one buffer, and of their gradients.

        Raises:
            RequestError: they do not lie in a buffer as they are gathered.
        """
        parameters = gradients = 0
        for one in self._parameters:
            _check(one, _PARAMETER)
            if one.fsdp_placement.dim != 0 or is_sharded(one._unsharded_param):
                raise RequestError(
                    "alternating buffers are for parameters that are cut along their "
                    "first dimension, and by data parallelism alone; leave them out"
                )
            (whole,) = one.all_gather_outputs
            parameters += aligned(whole.numel() * whole.itemsize)
            if one.sharded_param.requires_grad:
                dtype = one.reduce_dtype or whole.dtype
                gradients += aligned(whole.numel() * dtype.itemsize)
        return parameters, gradients

    def live_in(
        self,
        buffer: Tensor,
        gather: Callable[[Sequence[Tensor], Sequence[Tensor], Any, bool], Any],
        begin: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        """Let the parameters be gathered into a buffer, with no copy in or out.

        Args:
            buffer: bytes, as many as `whole_bytes` says.
            gather: called with parts of the buffer, with what this process has of each,
                the group, and whether the work is to be waited for later.
            begin: called where a pass has waited for the work.
            release: called where a pass has ended.
        """
        (group,) = self._groups
        parts, at = [], 0
        for one in self._parameters:
            (whole,) = one.all_gather_outputs
            end = at + whole.numel() * whole.itemsize
            part = buffer[at:end].view(whole.dtype)
            one.all_gather_outputs = [part]
            one._unsharded_param.data = part.as_strided(
                *(one._orig_size, one._contiguous_orig_stride, part.storage_offset())
            )
            one.alloc_all_gather_outputs = one.free_unsharded_param = _nothing
            parts.append(part)
            at += aligned(end - at)
        group.fsdp_params[-1].free_unsharded_param = release
        group.unshard_async_op = True  # on the stream of passes: it orders them
        self.module.set_custom_all_gather(InPlace(parts, gather, begin))

    def reduce_by(self, reduces: Reduces) -> None:
        """Leave sums to another."""
        self._reduces = reduces

    def part_sums(self) -> PartSums:
        """Sums from given memory."""
        (group,) = self._groups
        return PartSums(group.mesh_info, self._parameters)

    def gather_ahead(self, after: "Unit | None", before: "Unit | None") -> None:
        """Start to gather others when passes of this one begin.

        Args:
            after: what runs next in F.
            before: what runs next in B.
        """
        if after is not None:
            self.module.set_modules_to_forward_prefetch([after.module])
        if before is not None:
            self.module.set_modules_to_backward_prefetch([before.module])

    @property
    def pending(self) -> bool:
        """A gather is under way that nobody has waited for."""
        return any(group._all_gather_result is not None for group in self._groups)


def is_unit(module: nn.Module) -> bool:
    """True for a wrapped module; what is inside or around does not count."""
    return hasattr(module, "_get_fsdp_state")


def units_in(module: nn.Module) -> Iterator[nn.Module]:
    """The wrapped modules in a module, outer ones first."""
    return filter(is_unit, module.modules())


def managed(unit: nn.Module) -> Iterator[Tensor]:
    """The parameters that a wrapped module shards or replicates, as they are kept."""
    groups: Any = unit
    for group in groups._get_fsdp_state()._fsdp_param_groups:
        for one in group.fsdp_params:
            yield one.sharded_param


def _check(held: object, names: Sequence[str]) -> None:
    missing = [name for name in names if not hasattr(held, name)]
    if missing:
        raise RequestError(
            f"torch {torch.__version__} has no {type(held).__name__}.{missing[0]}, "
            "which sharded stages need; use torch 2.13, or layers that are not wrapped"
        )


def _nothing() -> None:
    """Take the place of what allocates and frees."""
