"""Pipelines on the simulated device: same bits, no race, no wait, no circle.

The reference of a scenario is FThenB on one stage of the same device, whose kernels may
differ from the CPU's, as a GPU's do. Replicas sum in another order: their reference is
1F1B in the same processes.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from cases import Shown, difference, make, merged
from gpu_waits import waits_are_errors
from torch import Tensor, nn

import simgpu
import zbpp
from simgpu.jobs import name_jobs
from simgpu.processes import Found, SimulatedPool, watched
from simgpu.scenarios import ONE_PROCESS, PROCESSES, Scenario, train
from zbpp.runtime.testing import inject

name_jobs()

MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV", "VPP", "VHalf")
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
LM = Scenario(mode="ZBH1")
Run = tuple[Scenario, dict[str, Any]]
"""A scenario, and settings of the device."""


@pytest.fixture(scope="module")
def pool() -> Iterator[SimulatedPool]:
    workers = SimulatedPool()
    yield workers
    workers.close()


@cache
def reference(wanted: Scenario, pool: SimulatedPool | None = None) -> Shown:
    """What a scenario leaves where everything runs at once."""
    if pool is not None:
        (outcome,) = outcomes(pool, [(wanted, {"policy": "eager"})])
        return outcome
    simgpu.begin("eager")
    outcome = train(wanted)
    assert simgpu.reports() == []
    return outcome


# ---- One process.


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's wait
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_bits_are_those_of_one_stage(name: str) -> None:
    check(ONE_PROCESS[name], ("lazy", 0), ("random", 1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_many_seeds_give_the_same_bits(mode: str) -> None:
    """Scenarios that any mode may take, each with half of the modes."""
    free = [
        x
        for x in ONE_PROCESS.values()
        if x.mode in MODES
        and not (x.switch or x.resume or x.reads_times or x.overflows)
        and not (x.optimizes or x.closes)
    ]
    for seed, scenario in enumerate(free[MODES.index(mode) % 2 :: 2]):
        check(replace(scenario, mode=mode), ("random", seed), ("eager", 0))


def check(scenario: Scenario, *policies: tuple[str, int]) -> None:
    expected = reference(scenario.reference)
    for policy, seed in policies:
        simgpu.begin(policy, seed)
        outcome = train(scenario)
        assert simgpu.reports() == [], (policy, seed)
        assert difference(outcome, expected) is None, (policy, seed)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's wait
@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV"])
def test_each_step_may_be_called_under_another_stream(mode: str) -> None:
    """As long as the caller orders them, as for every other work of torch's."""

    def run(changes: bool) -> list[float]:
        simgpu.begin("random", 8)
        trained = make(Scenario(mode=mode))
        losses, here = [], torch.cuda.current_stream()
        for step in range(4):
            stream = torch.cuda.Stream() if changes else here
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                losses.append(trained.step(*LM.batch(step)).loss)
            here = stream
        torch.cuda.current_stream().wait_stream(here)
        parameters = [p.detach() for _, p in trained.named_parameters()]
        losses.append(float(sum(p.sum() for p in parameters)))
        assert simgpu.reports() == []
        with torch.cuda.stream(here):
            trained.step(*LM.batch(4))
        with torch.cuda.stream(torch.cuda.Stream()):
            sum(p.sum() for p in parameters)
        assert simgpu.reports(), "the control: nothing orders these two streams"
        return losses

    assert run(True) == run(False)


def waits_of_steps(mode: str, **how: Any) -> set[tuple[str, str]]:
    """The jobs and functions in which the host waits, once all is known."""
    simgpu.begin("random", 3)
    trained = make(Scenario(mode=mode, optimizer="AdamW fused", **how))
    for step in range(3):
        trained.step(*LM.batch(step))
    before = simgpu.waits()
    with waits_are_errors():
        for step in range(3, 6):
            trained.step(*LM.batch(step))
    waits = {
        (job.split()[0] if job else "", line.split()[-1])
        for _, job, line in simgpu.waits_since(before)
    }
    assert simgpu.reports() == []
    trained.close()
    return waits


@pytest.mark.parametrize("how", [{}, {"recompute": "all"}], ids=str)
@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "VPP"])
def test_the_host_waits_for_the_sum_of_the_norms_only(
    mode: str, how: dict[str, Any]
) -> None:
    assert waits_of_steps(mode, **how) <= {("O", "read"), ("V", "read")}


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_hosts_of_processes_wait_for_the_sum_only(
    pool: SimulatedPool, mode: str
) -> None:
    assert pool.run(waits_of_steps, 2, mode) == [{("V", "read")}] * 2


def test_a_loss_that_synchronizes_is_reported() -> None:
    """The control of the tests above."""

    def waiting(outputs: Tensor, targets: Tensor) -> Tensor:
        outputs.sum().item()
        return LM.of.loss_fn(outputs, targets)

    simgpu.begin()
    trained = make(Scenario(mode="1F1B"), loss_fn=waiting)
    trained.step(*LM.batch(0))
    assert any(what == "item" and "F0" in job for what, job, _ in simgpu.waits())
    with waits_are_errors(), pytest.raises(RuntimeError, match="synchronizing"):
        trained.step(*LM.batch(1))


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_steps_leak_no_memory(mode: str) -> None:
    simgpu.begin("random", 7)
    trained = make(Scenario(mode=mode))
    sizes = []
    for step in range(6):
        trained.step(*LM.batch(step))
        trained.synchronize()
        torch.cuda.synchronize()
        sizes.append(len(simgpu.live()))
    assert sizes[3:] == [sizes[2]] * 3, sizes
    trained.close()


def noting(call: Any, name: str, host: Any, seen: set[str]) -> Any:
    """A pass that notes its name if copies are under way as it is issued."""

    def noted(*args: Any) -> Any:
        leaving = [host._side.stream] if host.gradients else []
        if not all(each.query() for each in (*host._arrivals.values(), *leaving)):
            seen.add(name)
        return call(*args)

    return noted


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's wait
def test_copies_of_masters_overlap_with_passes() -> None:
    """Both ways; and neither moments nor copies for rollbacks are on the device."""
    sizes = {}
    for on_host in (True, False):
        simgpu.begin("lazy")
        trained = make(replace(ONE_PROCESS["ZBV, on the host"], n_stages=1,
                               offload_optimizer=on_host))  # fmt: skip
        trained.step(*LM.batch(0))
        executor = trained.stages.first
        host, stage = executor.optimizer.host, executor.stage
        seen: set[str] = set()
        for name in ("forward", "backward_weight", "backward"):
            setattr(stage, name, noting(getattr(stage, name), name, host, seen))
        trained.step(*LM.batch(1))
        trained.synchronize()
        assert ("forward" in seen) == on_host
        assert bool(seen & {"backward_weight", "backward"}) == on_host
        torch.cuda.synchronize()
        sizes[on_host] = sum(int(block.split()[0]) for block in simgpu.live())
        parameters = sum(p.nbytes for _, p in trained.named_parameters())
        trained.close()
        assert simgpu.reports() == []
    assert sizes[False] - sizes[True] >= 2 * parameters


class Call(torch.autograd.Function):
    """Notes on which streams it runs."""

    used: ClassVar[set[tuple[str, int]]] = set()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Call.used.add(("F", torch.accelerator.current_stream().stream_id))
        return x.flip(0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        Call.used.add(("B", torch.accelerator.current_stream().stream_id))
        return dy.flip(0)


class Calling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + zbpp.overlap_point(Call.apply, super().forward(x))


def test_communication_runs_on_a_separate_stream() -> None:
    """In F and in B; what computes stays on the caller's."""
    simgpu.begin("lazy")
    here = torch.accelerator.current_stream().stream_id
    Call.used.clear()
    with zbpp.Pipeline(
        [Calling(8, 8) for _ in range(4)],
        "DualPipeV",
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        n_stages=1,
        n_microbatches=4,
        device="cuda",
    ) as trained:
        for _ in range(2):
            trained.step(torch.ones(8, 8), torch.ones(8, 8))
    (forward,) = {stream for kind, stream in Call.used if kind == "F"}
    (backward,) = {stream for kind, stream in Call.used if kind == "B"}
    assert forward == backward != here


# ---- Several processes.


def all_of(runs: list[Run]) -> list[Found]:
    """Runs one after the other, on a rank."""
    return [watched(train, scenario, **settings) for scenario, settings in runs]


def outcomes(pool: SimulatedPool, runs: list[Run]) -> list[Shown]:
    """What runs on as many processes leave; nothing is reported on any rank."""
    by_rank = pool.run(all_of, runs[0][0].n_processes, runs)
    found = []
    for run, ranks in zip(runs, zip(*by_rank, strict=True), strict=True):
        for one in ranks:
            assert one.reports == [], run
            assert one.counts["launches"] > 1000
        found.append(merged([one.value for one in ranks]))
    return found


def check_processes(
    pool: SimulatedPool, scenario: Scenario, *settings: dict[str, Any]
) -> None:
    """Under any settings the bits are those of the reference."""
    of_processes = pool if scenario.shard is not None else None
    expected = reference(scenario.reference, of_processes)
    runs = [(scenario, setting) for setting in settings]
    for outcome, setting in zip(outcomes(pool, runs), settings, strict=True):
        assert difference(outcome, expected) is None, setting


BY_DEFAULT = ("ZBV, 2 processes", "1F1B, 2 processes", "VPP, 4 processes",
              "ZBH1, tied ends", "shards")  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] * (x not in BY_DEFAULT))
        for x in PROCESSES
    ],
)
def test_bits_are_those_of_one_process(pool: SimulatedPool, name: str) -> None:
    few = {"delay_s": DELAY_S, "queues": 2, "n_streams": 4}
    random = {"policy": "random", "seed": 2}
    scenario = PROCESSES[name]
    more = few if scenario.shard is None else {}
    check_processes(pool, scenario, {"policy": "lazy"}, random | more)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_seeds_delays_and_limits_change_no_bit(
    pool: SimulatedPool, mode: str, n: int
) -> None:
    """Every mode meets every limit, on 2 or on 4 processes."""
    turn = MODES.index(mode) + n // 2
    settings: list[dict[str, Any]] = [{"policy": "lazy" if turn % 2 else "eager"}]
    settings += [
        {"policy": "random", "seed": seed, "delay_s": DELAY_S, **limits}
        for seed, limits in enumerate(LIMITS)
        if (seed + turn) % 2
    ]
    check_processes(pool, Scenario(mode=mode, n_processes=n), *settings)


def test_one_seed_repeats_the_run(pool: SimulatedPool) -> None:
    """Whatever other processes take for it."""
    plain = Scenario(mode="ZBV", n_processes=2)
    seed = {"policy": "random", "seed": 7}
    runs: list[Run] = [(plain, seed | {"delay_s": x}) for x in (0, DELAY_S, DELAY_S)]
    runs.append((replace(plain, recompute="all"), seed))
    by_rank = pool.run(all_of, 2, runs)
    *digests, control = (
        [f.digest for f in ranks] for ranks in zip(*by_rank, strict=True)
    )
    assert digests[0] == digests[1] == digests[2] != control


def struck() -> None:
    """Rank 1 is killed in its second step, at whose end rank 0 waits for it."""
    inject("kill:1:1:1F2")
    # it waits for the norm, as it may else begin the next step first
    watched(train, Scenario(mode="1F1B", post_validation=False, timeout_s=2.0))


def test_a_lost_peer_is_named(pool: SimulatedPool) -> None:
    words = r"PeerError: stage 0 waits at \w+ for .* from stage 1: .*rank 1 has left"
    with pytest.raises(AssertionError, match=words):
        pool.run(struck, 2, timeout_s=60)


def with_an_error_of_nccl(fails_at: int) -> None:
    """A message or collective of rank 0 ends with an error, as if a cable were cut."""
    at = fails_at if os.environ["RANK"] == "0" else 0
    watched(train, Scenario(mode="1F1B", timeout_s=2.0), fails_at=at)


@pytest.mark.parametrize(
    ("fails_at", "what"),
    [pytest.param(41, "allreduce", marks=pytest.mark.slow), (38, "receive")],
)
def test_an_error_of_nccl_is_reported(
    pool: SimulatedPool, fails_at: int, what: str
) -> None:
    with pytest.raises(AssertionError) as ends:
        pool.run(with_an_error_of_nccl, 2, fails_at, timeout_s=60)
    text = str(ends.value)
    assert f"DistBackendError: NCCL: {what} " in text
    assert "PeerError: stage 0 waits at " in text
    assert "had all its gradients" not in text, "nobody knows: the host was ahead"


def with_limit(name: str) -> None:
    """All streams share one hardware queue, or there is room for one kernel."""
    watched(train, Scenario(mode="VPP"), patience_s=2.0, **{name: 1.0})


@pytest.mark.parametrize(
    "name", ["queues", pytest.param("n_running", marks=pytest.mark.slow)]
)
def test_ranks_that_wait_for_one_another_are_named(
    pool: SimulatedPool, name: str
) -> None:
    """The control of all runs in processes: a circle of waits is found."""
    with pytest.raises(AssertionError) as stuck:
        pool.run(with_limit, 2, name, timeout_s=60)
    for rank in (0, 1):
        words = (
            rf"rank {rank}, stream \d+: (receive from|send to) rank {1 - rank} in \["
        )
        assert re.search(words, str(stuck.value)), stuck.value


def refused_for_one_queue() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        with pytest.raises(zbpp.RequestError) as caught:
            make(Scenario(mode="1F1B"))
    return str(caught.value)


def test_cuda_device_max_connections_1_is_refused(pool: SimulatedPool) -> None:
    """In it messages of VPP wait for one another, as above."""
    for words in pool.run(refused_for_one_queue, 2):
        assert "CUDA_DEVICE_MAX_CONNECTIONS" in words
