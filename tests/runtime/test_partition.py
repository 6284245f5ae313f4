"""Layers are dealt to chunks: every layer once, none of another stage built."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_model import build, refusal
from torch import nn

from zbpp.runtime.partition import build_chunks, partition_layers


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_layer_is_dealt_once_and_evenly(n_layers: int, n_chunks: int) -> None:
    if n_layers < n_chunks:
        assert f"{n_layers} layers cannot fill {n_chunks}" in refusal(
            partition_layers, n_layers, n_chunks
        )
        return
    ranges = partition_layers(n_layers, n_chunks)
    assert [layer for layers in ranges for layer in layers] == list(range(n_layers))
    sizes = [len(layers) for layers in ranges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("split", [(3, 3), (2, 2, 2), (7, 0), (8, -1)])
def test_a_split_that_does_not_add_up_is_refused(split: tuple[int, ...]) -> None:
    assert str(list(split)) in refusal(partition_layers, 7, 2, split)


def test_a_builder_makes_only_what_it_is_asked_for() -> None:
    asked: list[int] = []

    def builder(layers: range) -> list[nn.Module]:
        asked.extend(layers)
        return build(layers)

    chunks = build_chunks(builder, partition_layers(9, 4), [1, 3])
    assert asked == [3, 4, 7, 8]
    assert [(chunk.index, chunk.first) for chunk in chunks] == [(1, 3), (3, 7)]
