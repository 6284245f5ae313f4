"""Numbers of integer tensors, for layers whose shapes follow from them: experts, masks.

    router    topk(scores)             fakes do not know the scores: tokens go evenly
    batch     tokens, padding masks    of the micro-batch that is given
    masks     one_hot, ==, sum         computed for real beside the fakes: small
    shapes    nonzero, where, item     follow from the numbers

Real routing is uneven. What all experts take together is then the same, what one of
them takes at a time is not.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from zbpp.runtime.support.pytree import tensors_in

__all__ = ["MOST_NUMBERS", "IntegerNumbers"]

_ATEN = torch.ops.aten
MOST_NUMBERS = 2**24
"""Numbers of one tensor that are computed; more are left unknown."""
_CHOICES = {
    **dict.fromkeys((_ATEN.topk.default, _ATEN.sort.default, _ATEN.sort.stable), 1),
    **dict.fromkeys((_ATEN.max.dim, _ATEN.min.dim), 1),
    **dict.fromkeys((_ATEN.argmax.default, _ATEN.argmin.default), 0),
    **dict.fromkeys((_ATEN.argsort.default, _ATEN.multinomial.default), 0),
}
"""Operators that choose among numbers, and which of their results says what."""
_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class IntegerNumbers:
    """Keeps the numbers of integer and boolean fakes, where they are known.

    They are kept by storage, so that views and changes in place need no care.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of a `__torch_dispatch__` on fakes, and on their numbers.

        Raises:
            DynamicOutputShapeException: or another of fakes, where numbers are unknown.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        real_leaves = [self.of(x) if isinstance(x, Tensor) else x for x in leaves]
        pairs = list(zip(leaves, real_leaves, strict=True))
        is_known = all(n is not None for x, n in pairs if isinstance(x, Tensor))

        def numbers() -> Any:
            real, named = pytree.tree_unflatten(real_leaves, spec)
            named = {**named, "device": "cpu"} if named.get("device") else named
            with _disable_current_modes(), torch.no_grad():
                return func(*real, **named)

        if any(tag in func.tags for tag in _DYNAMIC):
            if is_known:
                return self._fakes_of(numbers(), args)
            return func(*self._without_masks(func, args), **kwargs)
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            if is_known:
                numbers()
            for tensor in _written(func, args, kwargs) if not is_known else ():
                self._known.pop(tensor.untyped_storage()._cdata, None)
        elif is_known and self._is_wanted(result, leaves):
            self.learn(result, numbers())
        elif func in _CHOICES:
            self._choose(func, args, kwargs, result)
        return result

    def of(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor, or None."""
        if tensor.layout is not torch.strided or not hasattr(tensor, "fake_mode"):
            return None
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return None
        with _disable_current_modes():
            return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                entry[1], tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def _is_wanted(self, result: Any, leaves: list[Any]) -> bool:
        """True if the results are new, small, and have an influence on shapes."""
        made = tensors_in(result)
        has_inputs = any(isinstance(leaf, Tensor) for leaf in leaves)
        return bool(made) and all(
            t.layout is torch.strided
            and t.untyped_storage()._cdata not in self._known
            and t.numel() <= MOST_NUMBERS
            and (has_inputs or not t.is_floating_point())
            for t in made
        )

    def learn(self, result: Any, numbers: Any) -> None:
        """Take real tensors as the numbers of fakes, in a structure of any kind."""
        for fake, real in zip(tensors_in(result), tensors_in(numbers), strict=True):
            storage = fake.untyped_storage()
            with _disable_current_modes():
                flat = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                kept = flat.untyped_storage()
            self._keep(storage, kept)
            view = self.of(fake)
            if view is not None:
                with _disable_current_modes():
                    view.copy_(real)

    def _keep(self, fake: torch.UntypedStorage, real: torch.UntypedStorage) -> None:
        key, entries = fake._cdata, self._known
        entries[key] = weakref.ref(fake, lambda _: entries.pop(key, None)), real

    def _fakes_of(self, numbers: Any, args: Any) -> Any:
        """Fakes in the shape of what is known, on the device of the arguments."""
        if not tensors_in(numbers):
            return numbers  # a number itself
        device = tensors_in(args)[0].device

        def fake(real: Any) -> Any:
            if not isinstance(real, Tensor):
                return real
            like = torch.empty_strided(
                real.shape, real.stride(), dtype=real.dtype, device=device
            )
            self.learn(like, real)
            return like

        return pytree.tree_map(fake, numbers)

    def _without_masks(self, func: Any, args: Any) -> Any:
        """Index by places where a call indexes by known masks."""
        if func is not _ATEN.index.Tensor:
            return args
        places: list[Tensor | None] = []
        for index in args[1]:
            mask = None if index is None else self.of(index)
            if mask is None or mask.dtype is not torch.bool:
                places.append(index)
                continue
            with _disable_current_modes():
                indices = mask.nonzero().unbind(1)
            sizes = [p.shape for p in indices]
            places += [index.new_empty(s, dtype=torch.int64) for s in sizes]
        return args[0], places

    def _choose(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Let every row choose the next ones, in turn."""
        place = _CHOICES[func]
        chosen = tensors_in(result)[place]
        scores = args[0]
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        dim = {**named, **kwargs}.get("dim", -1)
        if scores.dim() == 0 or chosen.numel() > MOST_NUMBERS:
            return
        n = scores.numel() if dim is None else scores.shape[dim]
        with _disable_current_modes():
            places = torch.arange(chosen.numel(), device="cpu")
            if chosen.dim() == scores.dim() and dim is not None:
                sizes = list(chosen.shape)
                rows = [*sizes[: dim % len(sizes)], *sizes[dim % len(sizes) + 1 :]]
                rows += [sizes[dim]]
                turns = places.view(rows).movedim(-1, dim)
            else:
                turns = places.view(chosen.shape)
            self.learn(chosen, turns % max(1, n))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Tensors that an operator changes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operand = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(operand)
