"""The global random generators: torch's, Python's and numpy's."""

import random
import sys
from typing import Any

import torch

from zbpp.runtime.support.devices import runs_ahead

__all__ = [
    "RandomState",
    "mixed_seed",
    "random_state",
    "seed_torch",
    "set_random_state",
]

RandomState = tuple[Any, ...]
"""States of torch's generators (CPU, device), Python's and numpy's; None: not there."""


def random_state(device: torch.device) -> RandomState:
    """The state of all generators that a forward on a device may draw from."""
    numpy = sys.modules.get("numpy.random")
    on_device = None
    if runs_ahead(device):
        on_device = torch.get_device_module(device).get_rng_state(device)
    cpu = torch.get_rng_state()
    return cpu, on_device, random.getstate(), numpy and numpy.get_state()


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Bring the generators back to a state."""
    cpu, on_device, pythons, numpys = state
    torch.set_rng_state(cpu)
    if on_device is not None:
        torch.get_device_module(device).set_rng_state(on_device, device)
    random.setstate(pythons)
    if numpys is not None:
        sys.modules["numpy.random"].set_state(numpys)


def seed_torch(number: int, device: torch.device) -> None:
    """Seed torch's generators that a forward on a device draws from."""
    seed = number & 0x7FFF_FFFF_FFFF_FFFF
    if device.type == "cpu":
        # torch.manual_seed notes a stack trace for each kind of absent device.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


_WORD = 2**64 - 1
_PRIMES = 11400714785074694791, 14029467366897019727, 2870177450012600261  # of xxHash


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into one of 64 bits: the same one under every Python."""
    return hash(numbers) & _WORD if _HASHES_SO else written_out(numbers)


def written_out(numbers: tuple[int, ...]) -> int:
    """Mix numbers by the short form of xxHash.

    It is the hash of their tuple in CPython since 3.8, by which dropout was always
    seeded: a run that is resumed under another Python must draw the same numbers.
    """
    first, second, mixed = _PRIMES
    for number in numbers:
        lane = number % (2**61 - 1) if number >= 0 else -(-number % (2**61 - 1))
        if lane == -1:
            lane = -2
        mixed = (mixed + lane * second) & _WORD
        mixed = ((mixed << 31 | mixed >> 33) & _WORD) * first & _WORD
    mixed = mixed + (len(numbers) ^ _PRIMES[2] ^ 3527539) & _WORD
    return 1546275796 if mixed == _WORD else mixed


_PROBES = (3, 1, 2, 5), (-1, 0, 2**70, -(2**61))
_HASHES_SO = all(hash(probe) & _WORD == written_out(probe) for probe in _PROBES)
"""Tuples hash so here: a tenth of the time, in the forward of every layer."""
