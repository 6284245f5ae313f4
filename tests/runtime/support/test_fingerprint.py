"""Processes tell tensors apart by a number each."""

import torch

from zbpp.runtime.support.fingerprint import fingerprints


def test_the_number_is_that_of_the_bits_in_their_order() -> None:
    x = torch.arange(3000.0)
    swapped, nearly = x.clone(), x.clone()
    swapped[[0, 2000]] = x[[2000, 0]]
    nearly[5] = x[5] * (1 + 2**-23)
    numbers = fingerprints([x, x.clone(), swapped, nearly, x.flip(0)])
    assert numbers[0] == numbers[1]
    assert len({*numbers}) == 4


def test_signed_zeros_and_kinds_of_numbers_differ() -> None:
    zero = torch.zeros(8)
    numbers = fingerprints([zero, -zero, zero.int(), torch.ones(8).bfloat16()])
    assert numbers[0] != numbers[1]
    assert fingerprints([zero])[0] == numbers[0]
