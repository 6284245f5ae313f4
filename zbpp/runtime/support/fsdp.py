"""Modules that `fully_shard` or `replicate` has wrapped, without FSDP2's schedule.

FSDP2 has no public way to reduce a module's gradients at the time of a job, nor to
leave out its prefetches, nor to widen gradients later than a backward leaves them. So
`Unit` uses names that torch does not document, and refuses a torch that lacks one of
`_NAMES`: a part of the work would be left out without a word. No other file touches
them.

Gradients of 16 bits that are summed in 32 are widened after each micro-batch, by who
adds gradients in order: here a backward is B, whose turn it may not be, and W follows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.core import RequestError

_NAMES = {
    "state": ("_lazy_init", "_fsdp_param_groups", "_comm_ctx"),
    "context": ("post_forward_order", "reduce_scatter_states"),
    "group": (
        "post_backward",
        "finalize_backward",
        "wait_for_unshard",
        "fsdp_params",
        "mesh_info",
        "_all_gather_result",
        "_reshard_after_forward",
    ),
    "parameter": (
        "sharded_param",
        "reduce_dtype",
        "unsharded_accumulated_grad",
        "_unsharded_param",
    ),
    "widened parameter": (
        "to_accumulated_grad_if_needed",
        "accumulate_unsharded_grad_if_needed",
    ),
    "widened group": ("_set_unsharded_grad_dtypes",),
}
"""Names of torch 2.13 to 2.15, by the object that has them.

Of the last two rows one is there: a parameter of torch 2.13 and 2.14 has a sum of more
bits next to its gradient, and from torch 2.15 on the gradient itself gets more bits.
"""


class _NoOrder(list[Any]):
    """An order of forwards that nothing can be prefetched by.

    It runs over all modules that share streams, which a pipeline interleaves: by it a
    backward gathers modules that no job waits for, and the next step would compute
    with what they were before the optimizer.
    """

    def append(self, _: Any) -> None:
        """Forget it."""


class Unit:
    """A module that `fully_shard` or `replicate` has wrapped; jobs run its collectives.

    It is gathered once, so that its forwards' parameters exist; all its processes must
    call.

    Raises:
        RequestError: this torch has other names than those of `_NAMES`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = cast(Any, module)
        state: Any = self.module._get_fsdp_state()
        _check_names("state", state)
        state._lazy_init()
        self._groups: Sequence[Any] = state._fsdp_param_groups
        self._context = state._comm_ctx
        _check_names("context", self._context)
        for group in self._groups:
            _check_names("group", group)
        self._context.post_forward_order = _NoOrder()
        self.gathers_by_itself = any(x._reshard_after_forward for x in self._groups)
        """Each pass gathers it, and drops it at its end."""
        self.module.set_is_last_backward(False)
        self.module.set_requires_gradient_sync(False, recurse=False)
        # Sums, as the losses have shares in that of all replicas.
        self.module.set_gradient_divide_factor(1.0)
        self.module.set_force_sum_reduction_for_comms(True)
        self.module.set_reshard_after_backward(self.gathers_by_itself, recurse=False)
        self.module.unshard()
        self.module.reshard()
        self._parameters = [p for group in self._groups for p in group.fsdp_params]
        for parameter in self._parameters:
            _check_names("parameter", parameter)
        self._widened = [x for x in self._parameters if x.reduce_dtype is not None]
        self._sums_apart = all(map(_has_sum, self._widened))
        for parameter in self._widened if self._sums_apart else ():
            parameter.accumulate_unsharded_grad_if_needed = _do_nothing
            parameter.to_accumulated_grad_if_needed = _do_nothing
        for group in () if self._sums_apart else self._groups:
            _check_names("widened group", group)
            group._set_unsharded_grad_dtypes = _do_nothing
        self._leave_narrow()

    @property
    def leaves(self) -> dict[nn.Parameter, nn.Parameter]:
        """Of each of the forwards' leaves the parameter with this process's part."""
        return {x._unsharded_param: x.sharded_param for x in self._parameters}

    @property
    def trains(self) -> bool:
        """True if a parameter is not frozen."""
        return any(x.sharded_param.requires_grad for x in self._parameters)

    def gather(self) -> None:
        """Start to gather the parameters; the first pass waits for them."""
        self.module.unshard(async_op=True)

    def drop(self) -> None:
        """Free the gathered parameters, also during a gather."""
        for group in self._groups:
            if group._all_gather_result is not None:
                group.wait_for_unshard()
        self.module.reshard()

    def reduce(self) -> None:
        """Start to reduce the gradients; parameters that have none count with zeros."""
        self.widen()
        self._fill_unused()
        for parameter in () if self._sums_apart else self._widened:
            total, parameter.wide_sum = parameter.wide_sum, None
            leaf = parameter._unsharded_param
            leaf.grad_dtype = parameter.reduce_dtype
            leaf.grad = total
        self.module.set_requires_gradient_sync(True, recurse=False)
        for group in self._groups:
            group.post_backward()
        self.module.set_requires_gradient_sync(False, recurse=False)
        self._leave_narrow()

    def wait(self) -> None:
        """Let what comes next wait for the reduced gradients."""
        for group in self._groups:
            group.finalize_backward()
        states = self._context.reduce_scatter_states
        while states:
            event = states.pop().event
            if event is not None:
                torch.accelerator.current_stream().wait_event(event)

    @property
    def pending(self) -> bool:
        """A gather is under way that has not been awaited."""
        return any(group._all_gather_result is not None for group in self._groups)

    def _leave_narrow(self) -> None:
        """Let the leaves' gradients have as many bits as the leaves."""
        for parameter in () if self._sums_apart else self._widened:
            leaf = parameter._unsharded_param
            leaf.grad_dtype = leaf.dtype

    @torch.no_grad()
    def widen(self) -> None:
        """Add the gradients that are there to sums of more bits, if they are to be."""
        for parameter in self._widened:
            gradient = parameter._unsharded_param.grad
            if gradient is None or gradient.dtype == parameter.reduce_dtype:
                continue
            parameter._unsharded_param.grad = None
            total = _wide_sum(parameter)
            if total is None:
                _set_wide_sum(parameter, gradient.to(parameter.reduce_dtype))
            else:
                total += gradient

    @property
    def widens(self) -> bool:
        """Some gradients may have fewer bits than their sums."""
        return bool(self._widened)

    def _fill_unused(self) -> None:
        """Give zeros to parameters that learn and have no gradient."""
        for parameter in self._parameters:
            whole = parameter._unsharded_param
            there = whole.grad is not None or _wide_sum(parameter) is not None
            if there or not parameter.sharded_param.requires_grad:
                continue
            zeros = torch.zeros_like(whole, requires_grad=False)
            if parameter.reduce_dtype is None:
                whole.grad = zeros
            else:  # all gradients of a sum have one dtype
                _set_wide_sum(parameter, zeros.to(parameter.reduce_dtype))


def is_unit(module: nn.Module) -> bool:
    """True for a wrapped module; what is inside or around does not count."""
    return hasattr(module, "_get_fsdp_state")


def units_in(module: nn.Module) -> Iterator[nn.Module]:
    """The wrapped modules in a module, outer ones first."""
    return filter(is_unit, module.modules())


def managed(unit: nn.Module) -> Iterator[tuple[Tensor, DeviceMesh]]:
    """The parameters of a wrapped module, as they are kept, and the mesh of each."""
    groups: Any = unit
    for group in groups._get_fsdp_state()._fsdp_param_groups:
        _check_names("group", group)
        for parameter in group.fsdp_params:
            yield parameter.sharded_param, group.mesh_info.mesh


def _check_names(row: str, thing: object) -> None:
    """Check that an object of torch's has the names of a row of `_NAMES`."""
    for name in _NAMES[row]:
        if not hasattr(thing, name):
            raise RequestError(
                f"torch {torch.__version__} has no {type(thing).__name__}.{name}, "
                "which sharded stages need; use torch 2.13, 2.14 or 2.15, or layers "
                "that are not wrapped"
            )


def _do_nothing(**_: Any) -> None:
    """Take the place of what torch would do by itself."""


def _has_sum(parameter: Any) -> bool:
    """True if torch has a sum of more bits than the gradient, as up to torch 2.14."""
    names = _NAMES["widened parameter"]
    return all(hasattr(parameter, name) for name in names)


def _wide_sum(parameter: Any) -> Tensor | None:
    """The sum of gradients of earlier micro-batches that has more bits than they."""
    name = "unsharded_accumulated_grad" if _has_sum(parameter) else "wide_sum"
    total: Tensor | None = getattr(parameter, name, None)
    return total


def _set_wide_sum(parameter: Any, total: Tensor) -> None:
    name = "unsharded_accumulated_grad" if _has_sum(parameter) else "wide_sum"
    setattr(parameter, name, total)
