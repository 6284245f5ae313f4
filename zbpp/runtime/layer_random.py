"""Random numbers of the layers: the same for a layer in every run of the same job.

    before each layer    the generators are seeded by (seed, step, layer, micro-batch)
    after the passes     they are as before: they belong to the caller

So dropout is the same under every mode, for any number of stages and in a replay, and
a ``DataLoader(shuffle=True)`` reads the same samples on every rank. Seeding takes time,
so chunks of torch's modules that draw nothing, without hooks, are left out.
"""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zbpp.runtime.support.random_state import (
    mixed_seed,
    random_state,
    seed_torch,
    set_random_state,
)


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
    """True for modules of torch, and its losses, that draw no random numbers."""
    if not isinstance(thing, nn.Module):
        return getattr(thing, "__module__", "") == "torch.nn.functional"
    return all(
        type(module).__module__ in _QUIET
        and not isinstance(module, nn.RReLU | nn.MultiheadAttention)
        and "forward" not in vars(module)
        for module in thing.modules()
    )


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """True if hooks may run during the passes of a module."""
    return any(
        m._forward_hooks
        or m._forward_pre_hooks
        or m._backward_hooks
        or m._backward_pre_hooks
        for m in modules
    )


class LayerRandom:
    """The seeds of the layers of one process; processes of other places draw others."""

    def __init__(self, device: torch.device, place: tuple[int, ...] = ()) -> None:
        self._device = device
        self._place = place
        self.use(0)
        self.latest = 0
        """The seed of the layer that runs."""

    def use(self, seed: int) -> None:
        """Draw by this seed from the next step on; the same on all ranks."""
        self._base = mixed_seed(seed, *self._place) if any(self._place) else seed

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring all generators back to their states at the end."""
        before = random_state(self._device)
        try:
            yield
        finally:
            set_random_state(before, self._device)

    def seed_layer(self, step: int, microbatch: int, layer: int) -> None:
        """Seed the generators before a layer runs on a micro-batch of a step."""
        self.latest = mixed_seed(self._base, step, layer, microbatch)
        self._seed(self.latest)

    @contextmanager
    def again(self, number: int) -> Iterator[None]:
        """Let a layer draw once more what it drew after this seed."""
        with self.restored():
            self._seed(number)
            yield

    def _seed(self, number: int) -> None:
        seed_torch(number, self._device)
        random.seed(number)
        if (numpys := sys.modules.get("numpy.random")) is not None:
            numpys.seed(number % 2**32)
