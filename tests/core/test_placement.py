import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import Placement, RequestError


def test_the_three_patterns():
    assert Placement.single(4).stage_of == (0, 1, 2, 3)
    assert Placement.interleaved(3, 2).stage_of == (0, 1, 2, 0, 1, 2)
    assert Placement.wave(3).stage_of == (0, 1, 2, 2, 1, 0)
    assert Placement.wave(2, 3).stage_of == (0, 1, 1, 0, 0, 1)


@given(p=st.integers(1, 9), v=st.integers(1, 5), wave=st.booleans())
def test_every_stage_holds_as_many_chunks_in_forward_order(p, v, wave):
    placement = (Placement.wave if wave else Placement.interleaved)(p, v)
    assert (placement.n_stages, placement.n_chunks) == (p, p * v)
    assert [len(chunks) for chunks in placement.chunks_of] == [v] * p
    for stage, chunks in enumerate(placement.chunks_of):
        assert list(chunks) == sorted(chunks)
        assert all(placement.stage_of[chunk] == stage for chunk in chunks)


@pytest.mark.parametrize("stage_of", [(), (1,), (0, 2), (-1, 0), (0, 10**12)])
def test_a_stage_without_a_chunk_is_refused(stage_of):
    with pytest.raises(RequestError, match="must hold at least one chunk") as error:
        Placement(stage_of)
    assert str(list(stage_of)) in str(error.value)
    Placement((0, 1, 0))  # stages may hold different numbers
