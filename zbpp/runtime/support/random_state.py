"""The global random generators: torch's, Python's and numpy's."""

import random
import sys
from hashlib import blake2b
from typing import Any

import torch

from zbpp.runtime.support.devices import runs_ahead

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
    # torch.manual_seed notes a stack trace for each kind of absent device.
    torch.default_generator.manual_seed(seed)
    if runs_ahead(device):
        generators = torch.get_device_module(device).default_generators
        generators[device.index or 0].manual_seed(seed)


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into one of 64 bits: the same one under every Python."""
    mixed = blake2b(repr(numbers).encode(), digest_size=8)
    return int.from_bytes(mixed.digest(), "little")
