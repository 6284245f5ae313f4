"""Pipelines in processes, over the simulated NCCL: same bits, no race, no circle.

The reference of the small model is FThenB on one stage of the same device. Replicas sum
in an order of their own: theirs is 1F1B in the same processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from gpu_waits import waits_are_errors
from small_model import N_LAYERS, assert_same, batch, make_pipeline

import simgpu
from simgpu.process_runs import Case, Trained, all_of, small
from simgpu.processes import Found, SimulatedPool, watched
from zbpp.runtime.testing import inject

MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV", "VPP", "VHalf")
TIED = {"ties": [((0, "weight"), (N_LAYERS - 1, "weight"))]}
LIMITS: tuple[dict[str, float], ...] = (
    {"rendezvous": 0},
    {"queues": 8},
    {"queues": 2},
    {"queues": 2, "rendezvous": 0},
    {"n_streams": 4},
    {"n_streams": 4, "queues": 2},
    {"n_running": 8},
)
DELAY_S = 2e-3

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def pool() -> Iterator[SimulatedPool]:
    workers = SimulatedPool()
    yield workers
    workers.close()


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


@cache
def one_stage(tied: bool = False) -> Trained:
    simgpu.begin("eager")
    trained = small("FThenB", 1, **(TIED if tied else {}))
    assert simgpu.reports() == []
    return trained


def run(pool: SimulatedPool, n: int, cases: list[Case]) -> list[list[Found]]:
    """What each case has found on each rank; nothing was reported on any."""
    by_rank = pool.run(all_of, n, cases)
    by_case = [list(ranks) for ranks in zip(*by_rank, strict=True)]
    for case, ranks in zip(cases, by_case, strict=True):
        for rank, found in enumerate(ranks):
            assert found.reports == [], (case, rank)
            assert found.counts["launches"] > 1000
    return by_case


def parameters_of(ranks: list[Found]) -> dict[str, torch.Tensor]:
    parameters: dict[str, torch.Tensor] = {}
    for found in ranks:
        parameters |= found.value[1]
    return parameters


def check_small(
    pool: SimulatedPool, n: int, cases: list[Case], *, tied: bool = False
) -> None:
    """The bits of all cases are those of one stage."""
    numbers, parameters = one_stage(tied)
    for case, ranks in zip(cases, run(pool, n, cases), strict=True):
        for found in ranks:
            assert found.value[0] == numbers, case
        assert_same(parameters_of(ranks), parameters)


def small_case(mode: str, policy: str, seed: int = 1, **settings: float) -> Case:
    return "small", (mode,), {}, {"policy": policy, "seed": seed, **settings}


def test_two_stages(pool: SimulatedPool) -> None:
    modes = zip(("1F1B", "ZBH1", "ZBV"), ("eager", "lazy", "random"), strict=True)
    check_small(pool, 2, [small_case(mode, policy) for mode, policy in modes])


def test_four_stages_with_delays_and_few_queues(pool: SimulatedPool) -> None:
    more = {"delay_s": DELAY_S, "queues": 2, "n_streams": 4}
    check_small(pool, 4, [small_case("VPP", "random", 2, **more)])


def test_tied_ends(pool: SimulatedPool) -> None:
    """What is sent at the start may be stepped before it has left."""
    case: Case = ("small", ("ZBH1",), TIED, {"policy": "random", "seed": 4})
    check_small(pool, 2, [case], tied=True)


def waits_of_steps(mode: str) -> set[tuple[str, str]]:
    """The jobs and functions in which the host waits, once all is known."""
    simgpu.begin("random", 3)
    pipeline = make_pipeline(
        mode, None, optimizer=fused, device=simgpu.DEVICE, clip_grad_norm=0.5,
        post_validation=True,
    )  # fmt: skip
    for step in range(3):
        pipeline.step(*batch(step))
    before = simgpu.waits()
    with waits_are_errors():
        for step in range(3, 6):
            pipeline.step(*batch(step))
    waits = {
        (job.split()[0] if job else "", line.split()[-1])
        for _, job, line in simgpu.waits_since(before)
    }
    pipeline.close()
    return waits


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_the_host_waits_for_the_sum_and_for_the_kinds_only(
    pool: SimulatedPool, mode: str
) -> None:
    first, second = pool.run(waits_of_steps, 2, mode)
    assert first == {("V", "read")}
    assert ("", "read") in second, "the kinds of the micro-batches"
    assert second <= {("", "read"), ("V", "read")}


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_seeds_delays_and_limits(pool: SimulatedPool, mode: str, n: int) -> None:
    """Every mode meets every limit, on 2 or on 4 processes."""
    turn = MODES.index(mode) + n // 2
    cases = [small_case(mode, "lazy" if turn % 2 else "eager")]
    cases += [
        small_case(mode, "random", seed, delay_s=DELAY_S, **limits)
        for seed, limits in enumerate(LIMITS)
        if (seed + turn) % 2
    ]
    check_small(pool, n, cases)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_options(pool: SimulatedPool, mode: str, tmp_path: Any) -> None:
    n = 2 + 2 * (MODES.index(mode) % 2)
    options: list[dict[str, Any]] = [
        {"folder": str(tmp_path / "saved")},
        {"post_validation": False},
        {"snapshots": True},
        {"recompute": "all"},
    ]
    if mode in ("ZBH1", "ZBH2"):
        options.append({"switches": True})
    cases: list[Case] = [
        ("small", (mode,), more, {"policy": "random", "seed": 3}) for more in options
    ]
    check_small(pool, n, cases)
    tied: list[Case] = [("small", (mode,), TIED, {"policy": "random", "seed": 4})]
    check_small(pool, n, tied, tied=True)


HOWS = (
    "bare",
    "replicate",
    "kept",
    "resharded",
    "optimizer",
    "gradients",
    "parameters",
)


def check_mesh(pool: SimulatedPool, how: str, modes: Any, **more: Any) -> None:
    """The bits of all modes are those of 1F1B in the same processes, as they come."""
    settings = [{"policy": "random", "seed": seed} for seed in range(len(modes))]
    cases: list[Case] = [("on mesh", ("1F1B", how), more, {"policy": "eager"})]
    cases += [
        ("on mesh", (mode, how), more, setting)
        for mode, setting in zip(modes, settings, strict=True)
    ]
    first, *others = run(pool, 4, cases)
    for case, ranks in zip(cases[1:], others, strict=True):
        for found, expected in zip(ranks, first, strict=True):
            assert found.value[0] == expected.value[0], case
        assert_same(parameters_of(ranks), parameters_of(first))


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_replicas_and_shards(pool: SimulatedPool, how: str) -> None:
    """The modes take turns: each meets two kinds of shards."""
    turn = HOWS.index(how)
    check_mesh(pool, how, [MODES[(turn + more) % len(MODES)] for more in (0, 3)])


@pytest.mark.slow
def test_alternating_buffers(pool: SimulatedPool) -> None:
    check_mesh(pool, "parameters", ("ZBH1", "ZBV"), alternating_buffers=True)


@pytest.mark.slow
def test_replicas_that_save_switch_and_are_tied(
    pool: SimulatedPool, tmp_path: Any
) -> None:
    check_mesh(pool, "parameters", ("ZBH1",), switches_at=2)
    check_mesh(pool, "bare", ("ZBH2", "VPP"), tied=True)
    check_mesh(pool, "parameters", ("ZBV",), folder=str(tmp_path))


def test_one_seed_is_one_run(pool: SimulatedPool) -> None:
    """Whatever other processes take for it."""
    cases = [small_case("ZBV", "random", 7, delay_s=x) for x in (0, DELAY_S, DELAY_S)]
    cases.append(("small", ("ZBV",), {"recompute": "all"}, cases[0][3]))
    *digests, control = (
        [found.digest for found in ranks] for ranks in run(pool, 2, cases)
    )
    assert digests[0] == digests[1] == digests[2] != control


def struck(fault: str) -> None:
    """Rank 1 comes to harm in its second step."""
    inject(fault)
    watched(partial(small, "1F1B", timeout_s=2.0, first_timeout_s=30.0))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "rank 1 has left no word"),
        pytest.param("stop", "rank 1 has left no word", marks=pytest.mark.slow),
        pytest.param("raise", "rank 1 failed first, in 1F2", marks=pytest.mark.slow),
    ],
)
def test_a_lost_peer_is_named(pool: SimulatedPool, fault: str, words: str) -> None:
    place = r"PeerError: stage 0 waits at \w+ for .* from stage 1: "
    with pytest.raises(AssertionError, match=f"{place}.*{words}"):
        pool.run(struck, 2, f"{fault}:1:1:1F2", timeout_s=60)


def failing(fails_at: int) -> None:
    """A message or collective of rank 0 ends with an error, as if a cable were cut."""
    at = fails_at if os.environ["RANK"] == "0" else 0
    watched(partial(small, "1F1B", timeout_s=2.0, first_timeout_s=30.0), fails_at=at)


@pytest.mark.parametrize(
    ("fails_at", "what"),
    [pytest.param(50, "allreduce", marks=pytest.mark.slow), (49, "receive")],
)
def test_an_error_of_nccl_is_told(
    pool: SimulatedPool, fails_at: int, what: str
) -> None:
    with pytest.raises(AssertionError) as ends:
        pool.run(failing, 2, fails_at, timeout_s=60)
    text = str(ends.value)
    assert f"DistBackendError: NCCL: {what} " in text
    assert "PeerError: stage 0 waits at " in text
    assert "had all its gradients" not in text, "nobody knows: the host was ahead"


@pytest.mark.slow
def test_the_environment_says_how_many_queues_there_are() -> None:
    script = (
        "import simgpu, torch; torch.ones(1, device='cuda'); "
        "print(simgpu.native.state())"
    )
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert len(json.loads(done.stdout)["queues"]) == 3, done.stderr
