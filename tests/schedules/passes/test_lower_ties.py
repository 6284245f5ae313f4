"""Gradients of tied parameters are messages behind the last W."""

import pytest

from zbpp.core import AddTied, Receive, Send, TiedGradient
from zbpp.planning import plan
from zbpp.schedules import lower, post_validated

MODES = ("FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZBV", "VHalf")


def exchanged(program: object, kind: type) -> list[tuple[str, int]]:
    return [
        (str(i.value), i.peer)
        for i in program
        if isinstance(i, kind) and isinstance(i.value, TiedGradient)
    ]


def test_what_a_program_looks_like() -> None:
    first, last = lower(plan("ZBH1", n_stages=2, n_microbatches=2), ties=[(0, 1)])
    assert [str(i) for i in first[-7:]] == [
        "receive gradient of tie 0 in chunk 1 from stage 1",
        "0B1",
        "0W1",
        "send gradient of tie 0 in chunk 0 to stage 1",
        "add the gradients of tied parameters",
        "reduce the gradient norm over all stages",
        "O",
    ]
    assert exchanged(last, Send) == [("gradient of tie 0 in chunk 1", 0)]
    assert exchanged(last, Receive) == [("gradient of tie 0 in chunk 0", 0)]


def test_ends_of_a_v_exchange_nothing() -> None:
    schedule = plan("ZBV", n_stages=2, n_microbatches=4)
    first, last = lower(schedule, ties=[(0, 3)])
    assert not exchanged(first, Send) and not exchanged(last, Send)
    assert AddTied(0) in first and AddTied(1) not in last


def test_three_holders_on_two_stages() -> None:
    schedule = plan("ZBV", n_stages=2, n_microbatches=4)
    first, last = lower(schedule, ties=[(0, 1, 3), (1, 2)])
    names = {f"gradient of tie 0 in chunk {c}" for c in (0, 3)}
    assert {name for name, _ in exchanged(first, Send)} == names
    assert exchanged(first, Receive) == [("gradient of tie 0 in chunk 1", 1)]
    assert exchanged(last, Send) == [("gradient of tie 0 in chunk 1", 0)]


@pytest.mark.parametrize("mode", MODES)
def test_channels_agree_and_a_chunk_sends_after_its_last_pass(mode: str) -> None:
    schedule = plan(mode, n_stages=3, n_microbatches=5)
    n = schedule.placement.n_chunks
    plans = [schedule]
    plans += [post_validated(schedule)] if mode not in ("FThenB", "1F1B", "VPP") else []
    for one in plans:
        for program in lower(one, ties=[(0, n - 1), (0, 1, n - 1)]):
            text = [str(i) for i in program]
            for place, i in enumerate(program):
                if isinstance(i, Send) and isinstance(i.value, TiedGradient):
                    later = text[place:]
                    assert not any(
                        t.startswith((f"{i.value.chunk}W", f"{i.value.chunk}B"))
                        for t in later
                    )
                if isinstance(i, AddTied):
                    assert text[place + 1].startswith("reduce")
                    assert not any("receive" in t for t in text[place:])
