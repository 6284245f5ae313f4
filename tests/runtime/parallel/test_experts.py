"""Experts over ``ep``, slices over ``cp``: as in one process, to the bit over modes."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_runs import (
    BREAKS,
    N_STEPS,
    Found,
    refusals,
    train_all,
    train_plainly,
)
from pool import Pool
from torch import nn

from zbpp.checkpoint.tensors import TensorReader
from zbpp.runtime.parallel.experts import UseTable

pytestmark = pytest.mark.dist

MODES = ("1F1B", "ZBH1", "ZBV", "VPP", "DualPipeV")
DP, EP, CP = ({f"{name}_parallel": 2} for name in ("data", "expert", "context"))
DP_EP = {**DP, **EP}
NIGHTLY = partial(pytest.param, marks=pytest.mark.nightly)

BREAKS_ON = dict.fromkeys(BREAKS, EP) | {"no sum over cp": CP, "no sum over dp": DP}

Case = tuple[str, dict[str, int], dict[str, Any]]


def assert_right(runs: list[list[Found]], steps: int) -> None:
    """Every run is the plain loop's to 1e-9 in 64 bits, and all have the same bits."""
    plain = train_plainly(steps)
    assert 2 <= plain.rollbacks < steps
    first: dict[str, torch.Tensor] = {}
    for at_rank in runs:
        for found in at_rank:
            assert found.losses == pytest.approx(plain.losses, rel=1e-9)
            assert found.norms == pytest.approx(plain.norms, rel=1e-9)
            assert found.validation == pytest.approx(plain.validation, rel=1e-9)
            assert found.rollbacks == plain.rollbacks
            assert found.losses == runs[0][0].losses
            assert found.norms == runs[0][0].norms
            for name, value in found.parameters.items():
                expected = plain.parameters[name]
                torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
                assert torch.equal(value, first.setdefault(name, value)), name
    assert first.keys() == plain.parameters.keys()


def cases(modes: tuple[str, ...], sizes: dict[str, int], **how: Any) -> list[Case]:
    return [(mode, sizes, how) for mode in modes]


@pytest.mark.parametrize("sizes", [EP, CP])
def test_two_stages_on_four_processes(sizes: dict[str, int], pool: Pool) -> None:
    assert_right(pool.run(train_all, 4, cases(("ZBV",), sizes, steps=3)), 3)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "n"), [(EP, 4), (CP, 4), (DP_EP, 8), ({**CP, **EP}, 8)]
)
def test_every_mode_for_twenty_steps(sizes: dict[str, int], n: int, pool: Pool) -> None:
    assert_right(pool.run(train_all, n, cases(MODES, sizes)), N_STEPS)


@pytest.mark.slow
def test_experts_as_dtensors(pool: Pool) -> None:
    more = cases(("ZBV", "1F1B"), DP_EP, steps=5, dtensors=True)
    assert_right(pool.run(train_all, 8, more), 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shard", [NIGHTLY("optimizer"), NIGHTLY("gradients"), "parameters"]
)
@pytest.mark.parametrize("sizes", [DP_EP, NIGHTLY({**CP, **EP})])
def test_shards_of_experts_and_of_the_rest(
    sizes: dict[str, int], shard: str, pool: Pool
) -> None:
    """Experts are dealt out over those that share them, the rest over all."""
    more = cases(("ZBV", "1F1B"), sizes, steps=5, shard=shard)
    assert_right(pool.run(train_all, 8, more), 5)


@pytest.mark.slow
def test_dtensors_that_are_sharded(pool: Pool) -> None:
    more = cases(("ZBV",), DP_EP, steps=5, shard="optimizer", dtensors=True)
    assert_right(pool.run(train_all, 8, more), 5)


@pytest.mark.slow
def test_shards_where_each_process_has_its_own_experts(pool: Pool) -> None:
    assert_right(
        pool.run(train_all, 4, cases(("ZBV",), EP, steps=5, shard="optimizer")), 5
    )


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", NIGHTLY("optimizer")])
def test_a_checkpoint_goes_from_any_number_to_any(
    shard: str, tmp_path: Path, pool: Pool
) -> None:
    """Experts are whole in it: from 1 process to 2 and back nothing changes."""
    one, two = {"data_parallel": 4}, DP_EP
    n = 8
    if shard == "none":
        one, two, n = {"data_parallel": 2}, EP, 4
    a, b, c = (str(tmp_path / name) for name in "abc")
    how = {"steps": 3, "shard": shard}
    pool.run(
        train_all,
        n,
        [
            ("ZBV", one, how | {"saves": a}),
            ("ZBV", two, how | {"saves": b, "loads": a}),
            ("ZBV", one, how | {"saves": c, "loads": b}),
        ],
    )
    saved = [read_everything(folder) for folder in (a, b, c)]
    experts = [name for name in saved[0] if ".experts." in name]
    assert sum(name.startswith("model/") for name in experts) == 12
    assert any(name.endswith("exp_avg") for name in experts)
    for other in saved[1:]:
        assert other.keys() == saved[0].keys()
        for name, value in other.items():
            assert torch.equal(value, saved[0][name]), name
    more = {"steps": 5, "shard": shard}
    runs = pool.run(
        train_all,
        n,
        [
            ("ZBV", one, more),
            ("ZBV", one, more | {"loads": c}),
            ("ZBV", two, more | {"loads": a}),
        ],
    )
    plain = train_plainly(5)
    for straight, resumed, elsewhere in runs:
        assert resumed.losses == straight.losses[3:]
        for name, value in straight.parameters.items():
            assert torch.equal(value, resumed.parameters[name]), name
            torch.testing.assert_close(
                elsewhere.parameters[name], plain.parameters[name], rtol=1e-9, atol=1e-9
            )


def read_everything(folder: str) -> dict[str, torch.Tensor]:
    """All tensors of the only checkpoint in a folder."""
    (manifest,) = Path(folder).glob("step-*/manifest.json")
    index = json.loads(manifest.read_text())["tensors"]
    reader = TensorReader(manifest.parent, index)
    return {name: reader.read(name) for name in index}


@pytest.mark.slow
def test_a_sum_that_is_left_out_or_done_twice_is_noticed(pool: Pool) -> None:
    """The controls of this file: each must fail."""
    broken: list[Case] = [
        ("ZBH1", sizes, {"steps": 3, "broken": what})
        for what, sizes in BREAKS_ON.items()
    ]
    broken.append(("ZBH1", CP, {"steps": 3, "weigh": "samples"}))
    runs = pool.run(train_all, 4, [*broken, ("ZBH1", EP, {"steps": 3})])
    for place, (*_, how) in enumerate(broken):
        with pytest.raises(AssertionError):
            assert_right([[at_rank[place]] for at_rank in runs], 3)
            pytest.fail(f"{how} is not noticed", pytrace=False)
    assert_right([[at_rank[-1]] for at_rank in runs], 3)


@pytest.mark.slow
def test_a_profile_measures_layers_that_wait_for_each_other(pool: Pool) -> None:
    """All processes run as many rounds, however long theirs take, and train on."""
    every = [("ZBV", sizes, {"steps": 5, "profiles": True}) for sizes in (EP, CP)]
    runs = pool.run(train_all, 4, every)
    for place in range(2):
        assert_right([[at_rank[place]] for at_rank in runs], 5)
    for at_rank in runs:
        layers = at_rank[0].profile.layers
        assert all(time > 0 for time in (*layers.f, *layers.w))


@pytest.mark.slow
def test_what_cannot_be_right_is_refused_with_a_way_out(pool: Pool) -> None:
    every = pool.run(refusals, 4)
    for case, words in {
        "over dp": r"layers\.\d\.experts\.gate_up_proj, .*: parameters that differ "
        r"between the replicas .* expert_parallel=.* expert_parameters=lambda",
        "not named": r"layers\.\d\.experts\..* expert_parameters=lambda",
        "named wrongly": "expert_parameters names no parameter of the model",
        "other names": r"layers\.1\.experts\.more.* none on 0 and \(2, 1\) on rank 1",
        "buffers": "leave alternating_buffers out",
        "wrapped over ep": r"wrapped over the ranks .* over no dimension",
        "wrapped over dp alone": r"over \['dp', 'cp'\], .*shard=",
        "order": "'dp', which must stand before 'ep'",
        "mixed": "gate_up_proj of a DealtExperts .* module of their own",
    }.items():
        for said in every:
            assert re.search(words, said[case]), (case, said[case])


def test_uses_of_experts_count_for_those_that_hold_them() -> None:
    """Of two processes along ep each tells of its own, and both of what they share."""
    router, own, other = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    first = UseTable([router, own], {own}, 0, 2)
    second = UseTable([router, other], {other}, 1, 2)
    total = first.vector({own}) + second.vector({router})
    assert first.used_by_none(total) == [own]
    assert second.used_by_none(total) == []
    total = first.vector({own, router}) + second.vector({router, other})
    assert second.used_by_none(total) == [router, other]
