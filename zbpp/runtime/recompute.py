"""Layers whose graph is not kept from F to B: B computes it again.

    F   keeps the layer's input              a non-reentrant checkpoint
    B   runs its forward again, once, then its backward

The second run must see what the first one saw, and leave no trace. While it runs, the
random generators and the buffers (as of a BatchNorm) are what they were in F; after
it they are what they were in B. Hooks that a layer registers on its input again are not
called. A layer that writes to its input is refused; writes through ``buffer.data`` and
other state of a layer, as a counter in Python, change twice.

Processes along ``tp`` have the same inputs, so each may keep a slice of them:

    F   x, on both of two processes    keep x[: n / 2] | x[n / 2 :]
    B   all-gather x, run the forward again
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from zbpp.core import RequestError
from zbpp.runtime.layer_random import LayerRandom
from zbpp.runtime.overlap import Overlap
from zbpp.runtime.support.pytree import flatten_tree, map_tensors, unflatten_tree


class Buffers:
    """The buffers of some layers at one moment, with copies."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(m for layer in layers for m in layer.modules())
        self._tables = [(m, dict(m._buffers)) for m in modules if m._buffers]
        every = {x: None for _, table in self._tables for x in table.values()}
        self._copies = [
            (x, x.detach().clone(), x._version) for x in every if x is not None
        ]

    def drop_constants(self) -> None:
        """Drop the copies of those that have not been written to since."""
        self._copies = [
            entry for entry in self._copies if entry[0]._version != entry[2]
        ]

    def restore(self) -> None:
        """Give every module the buffers that it had, with their values.

        Through ``data``: graphs that saved a buffer must not notice.
        """
        for buffer, copy, _ in self._copies:
            buffer.data.copy_(copy)
        for module, table in self._tables:
            module._buffers.clear()
            module._buffers.update(table)


class Slices:
    """Keeps slices of tensors that all processes of a group have alike.

    Tensors without a gradient stay whole: the batch has them, or other layers do.
    """

    def __init__(self, group: dist.ProcessGroup, overlap: Overlap) -> None:
        self._group, self._overlap = group, overlap
        self._checked: set[str] = set()

    def hooks(self, inputs: Iterable[object], title: str) -> saved_tensors_hooks:
        """Return hooks that keep inputs of a layer; the first ones are compared.

        Raises:
            RequestError: they differ between processes.
        """
        for x in inputs if title not in self._checked else ():
            if is_sliced(x):
                whole = self._gather(self._slice(x))
                if not torch.equal(_bytes_of(whole), _bytes_of(x)):
                    raise RequestError(
                        f"{title} reads other numbers on each process along 'tp', as "
                        "under sequence parallelism, so none can keep a slice for the "
                        "others; leave partition_activations out"
                    )
        self._checked.add(title)
        return saved_tensors_hooks(self._slice, self._gather)

    def _slice(self, x: Tensor) -> Any:
        if not is_sliced(x):
            return x
        flat, rank = _bytes_of(x), self._group.rank()
        size = -(-len(flat) // self._group.size())
        part = flat[rank * size : (rank + 1) * size]
        return pad(part, (0, size - len(part))), x.shape, x.dtype  # always a copy

    def _gather(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        part, shape, dtype = packed
        self._overlap.network_is_free.wait()  # all processes begin them in one order
        whole: Tensor = part.new_empty(self._group.size() * len(part))
        dist.all_gather_single(whole, part, group=self._group)
        return whole[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def is_sliced(x: object) -> TypeGuard[Tensor]:
    """True for tensors of which `Slices` keep slices."""
    if type(x) is not Tensor or x.layout is not torch.strided:
        return False
    return x.requires_grad and x.is_contiguous() and x.numel() > 0


def _bytes_of(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)


class Recomputed:
    """Runs a layer, by ``call``, so that B computes it again.

    With ``slices`` its inputs are kept by them.
    """

    def __init__(
        self,
        layer: nn.Module,
        title: str,
        random: LayerRandom,
        call: Callable[[object], object],
        slices: Slices | None = None,
    ) -> None:
        self._layer, self._title = layer, title
        self._random, self._call = random, call
        self._slices = slices

    def __call__(self, value: object) -> object:
        """Run the forward; as it is where no gradients are asked for.

        Raises:
            RequestError: the layer writes to its input.
        """
        if not torch.is_grad_enabled():
            return self._call(value)
        items, containers = flatten_tree(value)
        # for the arguments alone: a checkpoint has other hooks for the rest
        slices = self._slices
        hooks = nullcontext() if slices is None else slices.hooks(items, self._title)
        before = [(x, x._version) for x in items if isinstance(x, Tensor)]
        buffers, is_second = Buffers([self._layer]), False

        def forward(*items: object) -> object:
            if is_second:
                items = map_tensors(items, cache(_cut_off))
            return self._call(unflatten_tree(items, containers))

        @contextmanager
        def as_in_f(seed: int) -> Iterator[None]:
            nonlocal is_second
            is_second, now = True, Buffers([self._layer])
            buffers.restore()
            try:
                with self._random.again(seed):
                    yield
            except Exception as error:
                error.add_note(f"raised in {self._title}, which runs its forward again")
                raise
            finally:
                now.restore()

        with hooks:
            output: object = checkpoint(
                forward,
                *items,
                use_reentrant=False,
                preserve_rng_state=False,  # `again` seeds all generators
                context_fn=lambda: (nullcontext(), as_in_f(self._random.latest)),
            )
        buffers.drop_constants()
        if any(x._version != version for x, version in before):
            raise RequestError(
                f"{self._title} writes to its input, so it cannot be recomputed; let "
                "it write to x.clone(), or leave it out of recompute"
            )
        return output


def _cut_off(tensor: Tensor) -> Tensor:
    """Return an input for the second run, without the hooks that the first has set."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor
