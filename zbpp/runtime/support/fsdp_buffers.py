"""A module that `fully_shard` has wrapped, gathered and reduced in buffers of our own.

Torch gathers a layer into one tensor, in which every process's parts lie together, and
copies each parameter out of it to where it is used:

    parts -> copied into a tensor -> gathered there -> copied to parameters    torch
    parts -> gathered where parameters are used                                here

So a layer that is gathered ahead needs no memory but its own. Torch allocates what it
sums as well, and waits for the sum where it starts it, on CPUs; here the memory is
given, and the parts are added later:

    whole gradients -> copied -> reduce-scatter .. -> added to this process's parts

A row of that memory holds what one process gets, of all parameters that learn. One that
this process has not used counts with zeros, as others may have used it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.support.collectives import noting_broken
from zbpp.runtime.support.fsdp import Unit, check_names, do_nothing, fill_unused
from zbpp.runtime.support.sharded import is_sharded

__all__ = ["BufferedUnit", "InPlace", "PartSums", "Reduces", "aligned"]

_ALIGNED_BYTES = 64
"""Each parameter in a buffer begins at a multiple of it."""

_GROUP_NAMES = ("mesh_info", "device")
_PARAMETER_NAMES = (
    "_unsharded_param",
    "all_gather_outputs",
    "alloc_all_gather_outputs",
    "free_unsharded_param",
    "_orig_size",
    "_contiguous_orig_stride",
    "fsdp_placement",
    "sharded_size",
    "contiguous_sharded_stride",
    "padded_sharded_param_size",
    "to_sharded_dtensor",
)
"""Names of torch 2.13 to 2.15 that buffers need beside those of `Unit`."""


def aligned(n_bytes: int) -> int:
    """Bytes that a parameter takes of a buffer."""
    return -(-n_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


class Reduces(Protocol):
    """Sums gradients of a module."""

    def reduce(self) -> None:
        """Start to sum them."""

    def finish(self) -> None:
        """Have what was started."""


class BufferedUnit(Unit):
    """A wrapped module whose parameters and gradients live in buffers that are given.

    Args:
        module: the wrapped one.

    Raises:
        RequestError: see `Unit`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._reduces: Reduces | None = None
        for group in self._groups:
            check_names(group, _GROUP_NAMES)

    @property
    def device(self) -> torch.device:
        """The device that it is gathered on."""
        device: torch.device = self._groups[0].device
        return device

    @property
    def trains(self) -> bool:
        """True if a parameter is not frozen."""
        return any(
            parameter.sharded_param.requires_grad for parameter in self._parameters
        )

    def whole_bytes(self) -> tuple[int, int]:
        """Bytes of its parameters in parameter buffer, and of their gradients.

        Raises:
            RequestError: they do not lie in a buffer as they are gathered.
        """
        parameters = gradients = 0
        for parameter in self._parameters:
            check_names(parameter, _PARAMETER_NAMES)
            if parameter.fsdp_placement.dim != 0 or is_sharded(
                parameter._unsharded_param
            ):
                raise RequestError(
                    "alternating buffers are for parameters that are cut along their "
                    "first dimension, and by data parallelism alone; leave them out"
                )
            (whole,) = parameter.all_gather_outputs
            parameters += aligned(whole.numel() * whole.itemsize)
            if parameter.sharded_param.requires_grad:
                dtype = parameter.reduce_dtype or whole.dtype
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
        for parameter in self._parameters:
            (whole,) = parameter.all_gather_outputs
            end = at + whole.numel() * whole.itemsize
            part = buffer[at:end].view(whole.dtype)
            parameter.all_gather_outputs = [part]
            parameter._unsharded_param.data = part.as_strided(
                parameter._orig_size,
                parameter._contiguous_orig_stride,
                part.storage_offset(),
            )
            parameter.alloc_all_gather_outputs = parameter.free_unsharded_param = (
                do_nothing
            )
            parts.append(part)
            at += aligned(end - at)
        group.fsdp_params[-1].free_unsharded_param = release
        group.unshard_async_op = True  # on the stream of passes: it orders them
        self.module.set_custom_all_gather(InPlace(parts, gather, begin))

    def reduce_by(self, reduces: Reduces) -> None:
        """Leave sums to another."""
        self._reduces = reduces

    def reduce(self) -> None:
        """Start to sum the gradients; see `Unit.reduce`."""
        assert self._reduces is not None
        self._reduces.reduce()

    def wait(self) -> None:
        """Let what comes next wait for the reduced gradients."""
        assert self._reduces is not None
        self._reduces.finish()
        super().wait()

    def part_sums(self) -> "PartSums":
        """Sums from given memory."""
        (group,) = self._groups
        return PartSums(group.mesh_info, self._parameters)

    def gather_ahead(self, after: Unit | None, before: Unit | None) -> None:
        """Start to gather others when passes of this parameter begin.

        Args:
            after: what runs next in F.
            before: what runs next in B.
        """
        if after is not None:
            self.module.set_modules_to_forward_prefetch([after.module])
        if before is not None:
            self.module.set_modules_to_backward_prefetch([before.module])


class InPlace:
    """All-gathers of `fully_shard` right to where parameters are used.

    What torch takes for the tensor is only a name for the parts of a buffer.

    Args:
        parts: of the buffer, one for each parameter.
        gather: called with them, this process's part of each, the group, and whether
            the work is to be waited for later.
        begin: called where a pass has waited.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        gather: Callable[[Sequence[Tensor], Sequence[Tensor], Any, bool], Any],
        begin: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._gather = gather
        self.begin = begin

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A name for the parts; it has no memory."""
        return _Name(self, size[0], dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather."""
        shards = cast(_Name, input_tensor).shards
        parts = [p.view(x.dtype) for p, x in zip(self._parts, shards, strict=True)]
        work: dist.Work | None = self._gather(parts, shards, group, async_op)
        return work


class _Name(Tensor):
    """Stands for a gathered layer in torch's own code."""

    gathers: InPlace
    shards: Sequence[Tensor]

    @staticmethod
    def __new__(
        cls, gathers: InPlace, size: int, dtype: torch.dtype, device: torch.device
    ) -> "_Name":
        make: Any = Tensor._make_wrapper_subclass
        name: _Name = make(cls, (size,), dtype=dtype, device=device)
        name.gathers, name.shards = gathers, ()
        return name

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name: _Name
        match func._schema.name:
            case "fsdp::all_gather_copy_in":
                shards, name, *_ = args
                gathered = name._again()
                gathered.shards = shards
                return gathered, name._again()
            case "aten::view":
                return args[0]._again()
            case "fsdp::split_with_sizes_copy":
                args[0].gathers.begin()
                return None
        raise RequestError(
            f"torch {torch.__version__} does {func} with gathered parameters, which "
            "alternating buffers do not know; leave them out"
        )

    def _again(self) -> "_Name":
        return _Name(self.gathers, self.numel(), self.dtype, self.device)


class _Sum(NamedTuple):
    """A sum of gradients of one dtype: of whose, and this process's part of it."""

    parameters: Sequence[Any]
    whole: Tensor
    part: Tensor


class PartSums:
    """Sums of one layer; one at a time.

    Args:
        mesh_info: torch's, of the processes that have a part each.
        parameters: torch's, of the layer.
    """

    def __init__(self, mesh_info: Any, parameters: Iterable[Any]) -> None:
        self._group: dist.ProcessGroup = mesh_info.shard_process_group
        self._others = getattr(mesh_info, "replicate_process_group", None)
        self._parameters = list(parameters)
        self._sums: list[_Sum] = []
        self._works: list[dist.Work] = []

    @property
    def has_gradients(self) -> bool:
        """There is something to sum."""
        return any(
            parameter._unsharded_param.grad is not None
            for parameter in self._parameters
        )

    @torch.no_grad()
    def take(self, buffer: Tensor) -> None:
        """Copy the whole gradients to a buffer of bytes, and free them."""
        fill_unused(self._parameters)
        n, end = self._group.size(), 0
        alike: dict[torch.dtype, list[Any]] = {}
        for parameter in self._parameters:
            if (whole := parameter._unsharded_param).grad is not None:
                alike.setdefault(whole.grad.dtype, []).append(parameter)
        for dtype, parameters in alike.items():
            n_numbers = n * sum(
                parameter.padded_sharded_param_size.numel() for parameter in parameters
            )
            begin, end = end, end + n_numbers * dtype.itemsize
            rows = buffer[begin:end].view(dtype)
            whole = [parameter._unsharded_param.grad for parameter in parameters]
            torch._chunk_cat(whole, 0, n, out=rows.view(n, -1))
            for parameter in parameters:
                parameter._unsharded_param.grad = None
            self._sums.append(_Sum(parameters, rows, rows.new_empty(n_numbers // n)))

    def start(self) -> None:
        """Start the sums."""
        for total in self._sums:
            # torch 2.13 does not tell the type
            work: Any = dist.reduce_scatter_single(
                total.part, total.whole, dist.ReduceOp.SUM, self._group, async_op=True
            )
            self._works.append(work)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for them, and add them."""
        for work, total in zip(self._works, self._sums, strict=True):
            with noting_broken():
                work.wait()
            if self._others is not None:
                dist.all_reduce(total.part, group=self._others)
            begin = 0
            for parameter in total.parameters:
                _add(parameter, total.part, begin)
                begin += parameter.padded_sharded_param_size.numel()
        self._sums, self._works = [], []


def _add(parameter: Any, parts: Tensor, begin: int) -> None:
    """Add this process's part to its gradient; the first one is taken as it is."""
    size, stride = parameter.sharded_size, parameter.contiguous_sharded_stride
    part = parts.as_strided(size, stride, begin)
    shard = parameter.sharded_param
    if shard.grad is None:
        shard.grad = parameter.to_sharded_dtensor(part)
    else:
        shard.grad._local_tensor.add_(part)
    for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(shard)
