"""Random numbers of the layers: the same for a layer in every run of the same job.

    before each layer    the generators are seeded by (seed, step, layer, micro-batch)
    after the passes     they are as before: they belong to the caller

So dropout is the same under every mode, for any number of stages and in a replay, and
a ``DataLoader(shuffle=True)`` reads the same samples on every rank.

To seed a generator takes time, so only those are seeded that are used:

    torch's              in all chunks but those of torch's own modules that draw
                         nothing (`draws_nothing`), without hooks
    Python's, numpy's    there too in the first training step, which watches who draws;
                         afterwards only if a layer has

A layer that draws from Python's or numpy's generator for the first time in a later step
is found at the end of that step.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.random_state import mixed_seed

__all__ = ["LayerRandom", "draws_nothing", "has_hooks", "next_seed"]

_SIGNED = 2**63 - 1


def next_seed() -> int:
    """A number that depends on torch's generator, which stays as it is."""
    clone = torch.default_generator.clone_state()
    return int(
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=clone)
    )


_QUIET = {
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "container", "conv", "flatten", "linear",
                 "loss", "normalization", "sparse")
}  # fmt: skip
"""Files of torch whose modules draw nothing, but for two."""


def draws_nothing(thing: object) -> bool:
    """True for modules of torch's own, and its losses, that draw no random numbers."""
    if not isinstance(thing, nn.Module):
        return getattr(thing, "__module__", "") == "torch.nn.functional"
    return all(
        type(module).__module__ in _QUIET
        and not isinstance(module, nn.RReLU | nn.MultiheadAttention)
        and "forward" not in vars(module)
        for module in thing.modules()
    )


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """True if something may run beside the passes of a module."""
    return any(
        m._forward_hooks
        or m._forward_pre_hooks
        or m._backward_hooks
        or m._backward_pre_hooks
        for m in modules
    )


class _RareGenerator:
    """Python's generator, or numpy's.

    Args:
        state: returns its state.
        restore: sets a state.
        seed: seeds it.
        draw: draws a number that hardly any two states have in common.
    """

    def __init__(
        self,
        state: Callable[[], Any],
        restore: Callable[[Any], None],
        seed: Callable[[int], None],
        draw: Callable[[], object],
    ) -> None:
        self.state, self.restore = state, restore
        self._seed, self._draw = seed, draw
        self._next: object = None
        """Its next draw, if no layer has drawn since it was seeded."""
        self.is_watched = True
        """Until the first training step is over."""
        self.is_used = False
        """A layer has drawn from it."""

    def seed(self, number: int) -> None:
        """Seed it; `look` then notices whether a layer has drawn."""
        self._seed(number)
        if not self.is_used:
            self._next = self._draw()
            self._seed(number)

    def look(self) -> None:
        """Notice whether a layer has drawn since it was seeded; this draws a number."""
        self.is_used = self.is_used or self._draw() != self._next


class LayerRandom:
    """The generators of one process, lent to its layers.

    Args:
        device: of the layers.
        place: of the process, but for its stage, if others draw other numbers.
    """

    def __init__(self, device: torch.device, place: tuple[int, ...] = ()) -> None:
        self._device = device
        self._place = place
        self.use(0)
        self.latest = 0
        self._rare = {"random": _pythons()}
        self._seeded: list[_RareGenerator] = []
        self._generators: list[torch.Generator] = [torch.default_generator]
        self._is_complete = not runs_ahead(device)

    def use(self, seed: int) -> None:
        """Draw by this seed from the next step on; the same on all ranks."""
        self._base = mixed_seed(seed, *self._place) if any(self._place) else seed

    @contextmanager
    def borrowed(
        self, *, training: bool = True, may_draw: bool = True
    ) -> Iterator[None]:
        """Within this, layers may draw; afterwards all generators are as before.

        Args:
            training: the passes are those of a training step.
            may_draw: False: they are of layers that draw nothing, so Python's and
                numpy's generators need no look.
        """
        if not self._is_complete:
            self._add_device()
        if "numpy" not in self._rare and "numpy.random" in sys.modules:
            self._rare["numpy"] = _numpys()
        rare = [*self._rare.values()] if may_draw else []
        with self._as_before(rare):
            for generator in rare:
                generator.seed(0)
            self._seeded = [x for x in rare if x.is_used or x.is_watched]
            try:
                yield
            finally:
                for generator in rare:
                    generator.look()
                    generator.is_watched = generator.is_watched and not training

    def seed_layer(self, step: int, microbatch: int, layer: int) -> None:
        """Seed the generators before a layer.

        Args:
            step: its number.
            microbatch: its number in the step.
            layer: global index.
        """
        number = self.latest = mixed_seed(self._base, step, layer, microbatch)
        for torchs in self._generators:
            torchs.manual_seed(number & _SIGNED)
        for rare in self._seeded:
            rare.look()
            rare.seed(number)

    @contextmanager
    def again(self, number: int) -> Iterator[None]:
        """Within this, a layer draws once more what it drew behind this seed.

        Args:
            number: `latest`, as it was then.
        """
        with self._as_before(self._seeded):
            for torchs in self._generators:
                torchs.manual_seed(number & _SIGNED)
            for rare in self._seeded:
                rare.look()
                if rare.is_used:
                    rare.seed(number)
            yield

    @contextmanager
    def _as_before(self, rare: Iterable[_RareGenerator]) -> Iterator[None]:
        """Afterwards torch's generators and others have the states that they had."""
        states = [(x.set_state, x.get_state()) for x in self._generators]
        others = [(x.restore, x.state()) for x in rare]
        try:
            yield
        finally:
            for restore, state in (*states, *others):
                restore(state)

    def _add_device(self) -> None:
        """Add the device's own generator, which is there once it is initialised."""
        every = torch.get_device_module(self._device).default_generators
        self._generators.append(every[self._device.index or 0])
        self._is_complete = True


def _pythons() -> _RareGenerator:
    draw = partial(random.getrandbits, 64)
    return _RareGenerator(random.getstate, random.setstate, random.seed, draw)


def _numpys() -> _RareGenerator:
    numpys = sys.modules["numpy.random"]
    return _RareGenerator(
        numpys.get_state,
        numpys.set_state,
        lambda number: numpys.seed(number % 2**32),
        numpys.random_sample,
    )
