"""Contenders by name, and requests that cannot be met."""

from math import nan
from pathlib import Path

import pytest

from zbpp.bench.names import contenders_of, torch_placement
from zbpp.bench.request import BenchRequest, planned
from zbpp.bench.run import difference
from zbpp.cli import main
from zbpp.core import Placement, RequestError


def test_ours_come_first_each_once():
    found = contenders_of(["zb-h1", "ZBV", "ZBH1"], ["torch:gpipe", "TORCH"])
    assert found[:3] == ("zbpp:ZBH1", "zbpp:ZBV", "torch:GPipe")
    assert found[3:] == tuple(
        f"torch:{name}"
        for name in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble",
                     "ZBVZeroBubble", "DualPipeV")
    )  # fmt: skip


@pytest.mark.parametrize("peer", ["ZBV", "torch:ZBV", "jax"])
def test_an_unknown_peer_is_refused(peer):
    with pytest.raises(RequestError, match=f"--peers {peer}: write torch"):
        contenders_of([], [peer])


def test_chunks_lie_as_torch_lays_them():
    assert torch_placement("GPipe", 3) == Placement.single(3)
    assert torch_placement("DualPipeV", 3) == Placement.wave(3)
    assert torch_placement("LoopedBFS", 3) == Placement.interleaved(3, 2)


def request(costs: Path, *more: str) -> BenchRequest:
    return BenchRequest(
        contenders=("zbpp:ZBV", "zbpp:auto", *more),
        stages=2,
        microbatches=4,
        load=lambda: pytest.fail("no process was started"),
        out=costs.parent,
        command="",
        emulate=costs,
    )


def test_all_is_planned_before_a_process_starts(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text('{"f": 1, "b": 2, "w": 3}')
    found = planned(request(file)).schedules
    assert list(found) == ["zbpp:ZBV", "zbpp:auto"] and all(found.values())
    with pytest.raises(RequestError, match="torch:1F1B cannot run with --emulate"):
        planned(request(file, "torch:1F1B"))
    file.write_text('{"f": [1, 2, 3]}')
    with pytest.raises(RequestError, match="zbpp:ZBV cannot run: "):
        planned(request(file))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--stages is missing"),
        (["--stages", "1"], "it needs 2 or more"),
        (["--stages", "2", "--rounds", "0"], "--rounds is 0"),
        (["--stages", "2", "--modes", "ZBX"], "ZBX"),
        (["--stages", "2", "--modes", "none"], "nothing is to be compared"),
        (["--stages", "2", "--emulate", "x", "--model", "a:b"], "whose layers sleep"),
        (["--stages", "2", "--out", __file__], "is a file; name a folder"),
    ],
)
def test_a_wrong_request_is_one_line(words, said, tmp_path, capsys):
    assert main(["bench", "--out", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        ((2.0, 1.0), ""),
        ((2.00001, 1.0), ""),
        ((2.001, 1.0), "loss"),
        ((2.0, 1.001), "gradient norm"),
        ((nan, 1.0), "loss"),
    ],
)
def test_a_step_that_differs_is_refused(step, wrong):
    text = difference((2.0, 1.0), step, 1e-5)
    assert text.startswith(f"refused: {wrong}") if wrong else not text
