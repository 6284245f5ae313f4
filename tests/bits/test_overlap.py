"""Passes stop at overlap points: who computes meanwhile, and what happens to errors.

That results do not change is shown by the rows of `test_one_process`.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from cases import plan_in_parts
from pool import Pool
from torch import Tensor, nn

import zbpp
from zbpp import diagnostics
from zbpp.core import Pair, Part, passes_in

PATIENCE_S = 30.0
"""For another pass's computation, which comes at once where it comes at all."""
WIDTH, M = 8, 6


class Log:
    """Computations and communications of passes, in order."""

    def __init__(self) -> None:
        self.computed: list[tuple[str, str]] = []
        self.communicated: list[tuple[str, str]] = []
        self.beside: list[tuple[str, str]] = []
        """Communications that lasted until the other pass of the pair computed."""
        self.partner: dict[str, str] = {}
        self._wait_s = PATIENCE_S
        self._n: Counter[str] = Counter()
        self._seen: dict[str, int] = {}
        self._grown = threading.Condition()

    def compute(self, job: str, name: str) -> None:
        with self._grown:
            self.computed.append((job, name))
            self._n[job] += 1
            self._seen[job] = self._n[self.partner.get(job, "")]
            self._grown.notify_all()

    def communicate(self, job: str, name: str) -> None:
        """Last until the pair's other pass has computed since this one did."""
        with self._grown:
            self.communicated.append((job, name))
            other, seen = self.partner.get(job), self._seen.get(job, 0)
            if other is not None:
                if self._grown.wait_for(lambda: self._n[other] > seen, self._wait_s):
                    self.beside.append((job, name))
                else:
                    self._wait_s = 0.0  # once is enough


class _Noted(torch.autograd.Function):
    """Calls functions in the forward and in the backward: with the pass, the tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, note: Callable[[str], None], send: Callable[..., Tensor]
    ) -> Tensor:
        ctx.note, ctx.send = note, send
        note("F")
        return send(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.note("B")
        return ctx.send(dy), None, None


class Layer(nn.Module):
    """attention | dispatch | experts | combine, and a skip.

    Args:
        index: of the layer.
        log: of computations and communications.
        chunk: that the layer is in.
        has_points: else it computes its attention alone.
        watch: called in every part with the pass and the part's name.
        send: the result of a communication; the function is its transpose.
    """

    def __init__(
        self,
        index: int,
        log: Log,
        chunk: int,
        *,
        has_points: bool = True,
        watch: Callable[[str, str], None] = lambda job, name: None,
        send: Callable[[Tensor], Tensor] = Tensor.clone,
    ) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index, self.log, self.chunk = index, log, chunk
        self.has_points, self.watch, self.send = has_points, watch, send
        self.attention, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.count: Counter[tuple[str, str]] = Counter()

    def noted(self, x: Tensor, name: str, kind: str) -> Tensor:
        def note(half: str) -> None:
            microbatch = self.count[half, name] % M
            self.count[half, name] += 1
            job = f"{self.chunk}{half}{microbatch}"
            self.watch(job, name)
            getattr(self.log, kind)(job, f"{half} {name}{self.index}")

        send = self.send if kind == "communicate" else Tensor.clone
        result: Tensor = _Noted.apply(x, note, send)
        return result

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.noted(torch.tanh(self.attention(x)), "attention", "compute")
        if not self.has_points:
            return hidden
        hidden = zbpp.overlap_point(self.noted, hidden, "dispatch", "communicate")
        hidden = self.noted(self.experts(hidden), "experts", "compute")
        return x + zbpp.overlap_point(self.noted, hidden, "combine", "communicate")


def pipeline_of(layers: list[Any], mode: Any = "DualPipeV", **more: Any) -> Any:
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    settings = {"n_stages": 1, "n_microbatches": M, "optimizer": adamw} | more
    return small.make(layers, mode, **settings)


IN_PARTS = {"n_stages": 1, "n_microbatches": M, "n_layers": 2}


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2 * M, WIDTH, generator=generator)
    return x, y


def traced(n_layers: int, *, overlap: bool = True, **more: Any) -> Log:
    """The log of a step of two chunks."""
    log = Log()
    points = more.pop("points", (True,) * n_layers)
    layers = [
        Layer(i, log, 2 * i // n_layers, has_points=points[i]) for i in range(n_layers)
    ]
    execution = zbpp.Execution(overlap=overlap)
    with pipeline_of(layers, execution=execution, **more) as pipeline:
        for job in pipeline.schedule.orders[0]:
            if overlap and isinstance(job, Pair) and all(points):
                names = [str(x).replace("W", "") for x in passes_in(job)]
                log.partner |= dict(zip(names, reversed(names), strict=True))
        pipeline.step(*batch())
    return log


def of_pair(events: list[tuple[str, str]], *jobs: str) -> list[str]:
    return [name for job, name in events if job in jobs]


# ---- The order of the turns.


def test_layers_interleave_as_drawn() -> None:
    """One layer a chunk:

    computes       F attention  B experts   F experts    B attention
    communicates   B combine'   F dispatch  B dispatch'  F combine
    """
    log = traced(2)
    assert of_pair(log.computed, "1F1", "0B0") == [
        "F attention1", "B experts0", "F experts1", "B attention0",
    ]  # fmt: skip
    assert of_pair(log.communicated, "1F1", "0B0") == [
        "B combine0", "F dispatch1", "B dispatch0", "F combine1",
    ]  # fmt: skip
    in_pairs = [x for x in log.communicated if x[0] in log.partner]
    assert len(in_pairs) > 2 * M and log.beside == in_pairs, "each, in every pair"


def test_chunks_of_two_layers_interleave() -> None:
    log = traced(4)
    assert of_pair(log.computed, "0F2", "1B1") == [
        "F attention0", "B experts3", "F experts0", "B attention3",
        "F attention1", "B experts2", "F experts1", "B attention2",
    ]  # fmt: skip
    assert of_pair(log.communicated, "0F2", "1B1") == [
        "B combine3", "F dispatch0", "B dispatch3", "F combine0",
        "B combine2", "F dispatch1", "B dispatch2", "F combine1",
    ]  # fmt: skip


def test_without_overlap_passes_run_one_after_the_other() -> None:
    """The control of the two above."""
    log = traced(2, overlap=False)
    assert of_pair(log.computed, "1F1", "0B0") == [
        "F attention1", "F experts1", "B experts0", "B attention0",
    ]  # fmt: skip


def test_a_pass_without_points_runs_under_the_others_communication() -> None:
    log = traced(2, points=(True, False))
    assert of_pair(log.computed, "0F2", "1B1") == [
        "F attention0", "B attention1", "F experts0",
    ]  # fmt: skip
    assert of_pair(log.computed, "1F1", "0B0") == [
        "F attention1", "B experts0", "B attention0",
    ]  # fmt: skip


def test_parts_run_in_the_order_of_their_plan() -> None:
    """One stage with two layers in one chunk; the W of a layer is not logged."""
    plan = plan_in_parts("ZB", **IN_PARTS)
    names = {
        "F": ["F attention0", "F experts0", "F attention1", "F experts1"],
        "B": ["B experts1", "B attention1", "B experts0", "B attention0"],
    }
    (row,) = zbpp.simulator.simulate(plan.schedule, plan.costs).rows
    parts = [str(slot.job).partition(".") for slot in row]
    planned = [
        (of, names[of[1]][int(index) // 2])
        for of, _, index in parts
        if index and of[1] in names
    ]
    logs = {}
    for overlap in (True, False):
        logs[overlap] = log = Log()
        layers = [Layer(i, log, 0) for i in range(2)]
        execution = zbpp.Execution(overlap=overlap)
        with pipeline_of(layers, plan, execution=execution) as pipeline:
            pipeline.step(*batch())
    assert logs[True].computed == planned != logs[False].computed
    assert sorted(logs[False].computed) == sorted(planned)


def test_a_recomputed_forward_waits_for_the_network() -> None:
    """It communicates within its B, while the F of the pair may have begun to."""
    busy = threading.Lock()

    def send(x: Tensor) -> Tensor:
        assert busy.acquire(blocking=False), "two communications at a time"
        time.sleep(0.01)
        busy.release()
        return x.clone()

    for recompute in (None, "all"):
        layers = [Layer(i, Log(), i // 2, send=send) for i in range(4)]
        request = zbpp.PlanRequest(
            schedule="DualPipeV", n_stages=1, n_microbatches=M, n_layers=4,
            recompute=recompute,
        )  # fmt: skip
        with pipeline_of(layers, zbpp.make_plan(request)) as pipeline:
            pipeline.step(*batch())


# ---- Times.


def jobs_of(layers: list[nn.Module], mode: Any, *, overlap: bool = True) -> Any:
    """Jobs that have times in the second step, and the measured costs."""
    execution = zbpp.Execution(overlap=overlap)
    with pipeline_of(layers, mode, execution=execution) as pipeline:
        for step in range(2):
            pipeline.step(*batch(step))
        (row,) = diagnostics.timeline(pipeline).rows
        costs = diagnostics.measured_costs(pipeline, joint=mode == "DualPipeV")
        return {str(slot.job) for slot in row}, costs


def test_interleaved_pairs_have_separate_times() -> None:
    layers = [Layer(i, Log(), i) for i in range(2)]
    jobs, costs = jobs_of(layers, "DualPipeV")
    assert {"0F0", "(1F1;0BW0)OVERLAP_F_B"} <= jobs and "1F1" not in jobs
    assert len(costs.fb) == 2 and min(costs.fb) > 0
    jobs, costs = jobs_of(layers, "DualPipeV", overlap=False)
    assert "1F1" in jobs and costs.fb is None


def test_parts_have_times_and_layers_without_points_have_none() -> None:
    jobs, costs = jobs_of(
        [Layer(i, Log(), 0) for i in range(2)], plan_in_parts("ZB", **IN_PARTS)
    )
    assert {"0F0.0", "0B0.1", "0W0.0"} <= jobs
    assert all(min(times) > 0 for times in (costs.f, costs.b, costs.w))
    layers = [Layer(i, Log(), 0, has_points=False) for i in range(2)]
    jobs, _ = jobs_of(layers, plan_in_parts("ZB", **IN_PARTS))
    assert {"0F0", "0B0", "0W0"} <= jobs and "0F0.0" not in jobs


# ---- Threads and errors.


def n_threads() -> int:
    return sum(thread.name.startswith("zbpp ") for thread in threading.enumerate())


def test_layers_without_points_start_no_thread() -> None:
    def n_seen(*, has_points: bool) -> int:
        seen: set[int] = set()

        def watch(job: str, name: str) -> None:
            seen.add(n_threads())

        layers = [
            Layer(i, Log(), i, has_points=has_points, watch=watch) for i in range(2)
        ]
        with pipeline_of(layers) as pipeline:
            pipeline.step(*batch())
        return max(seen)

    assert n_seen(has_points=False) == 0 and n_seen(has_points=True) == 2


FAILS = {
    "pairs": ("DualPipeV", {"F": "1F1", "B": "0BW0"}),
    "parts": ("ZB", {"F": "0F1", "B": "0B0"}),
}
"""A mode, and the F and the B that its first passes with points are of."""


@pytest.mark.parametrize("plan", FAILS)
@pytest.mark.parametrize("half", ["F", "B"])
@pytest.mark.parametrize("place", ["experts", "dispatch"])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_error_ends_all_open_passes_with_its_message(
    plan: str, half: str, place: str, error: type[BaseException]
) -> None:
    mode, failing = FAILS[plan]
    job = failing[half]
    seen: list[tuple[str, str]] = []

    def watch(running: str, name: str) -> None:
        seen.append((running, name))
        if seen[-1] == (job.replace("W", ""), place):
            raise error(f"{half} breaks")

    chunks = (0, 1) if mode == "DualPipeV" else (0, 0)
    layers = [Layer(i, Log(), chunks[i], watch=watch) for i in range(2)]
    pipeline = pipeline_of(
        layers, mode if mode == "DualPipeV" else plan_in_parts(mode, **IN_PARTS)
    )
    with pytest.raises(error, match=f"{half} breaks") as caught:
        pipeline.step(*batch())
    assert n_threads() == 0
    after = seen[seen.index((job.replace("W", ""), place)) + 1 :]
    computed = [x for x in after if x[1] in ("attention", "experts")]
    assert not computed or place == "dispatch", "no other pass continues"
    if error is ArithmeticError:
        notes = caught.value.__notes__
        assert f"in {job}" in notes, notes
        assert any(job in note and "micro-batch" in note for note in notes)
    with pytest.raises(RuntimeError, match="the pipeline has ended"):
        pipeline.step(*batch())


COLOUR: ContextVar[str] = ContextVar("colour", default="none")


def state_here() -> dict[str, Any]:
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype of autocast": torch.get_autocast_dtype("cpu"),
        "cache of autocast": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "context": COLOUR.get(),
    }


def test_passes_run_with_the_thread_state_of_the_caller() -> None:
    """Passes in separate threads, and passes without."""
    seen: dict[bool, list[Any]] = {}
    for overlap in (True, False):
        found = seen[overlap] = []

        def watch(job: str, name: str, found: list[Any] = found) -> None:
            found.append((job, name, state_here()))

        layers = [Layer(i, Log(), i, watch=watch) for i in range(2)]
        token = COLOUR.set("red")
        with (
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
            pipeline_of(layers, execution=zbpp.Execution(overlap=overlap)) as pipeline,
        ):
            pipeline.step(*batch())
        COLOUR.reset(token)
    assert sorted(map(str, seen[True])) == sorted(map(str, seen[False]))
    thread = threading.Thread(target=lambda: seen[True].append(state_here()))
    thread.start()
    thread.join()
    assert seen[True][-1]["context"] == "none" != seen[True][0][2]["context"]


def test_outside_a_pipeline_overlap_point_is_a_plain_call() -> None:
    def swap(given: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
        return {"a": given["b"] * scale, "b": given["a"], "counts": given["counts"]}

    def run(call: Any) -> list[Tensor]:
        x, y = (torch.arange(3.0 * i, 3.0 * i + 3, requires_grad=True) for i in (0, 1))
        result = call({"a": x * 2, "b": y + x, "counts": torch.tensor([1, 2])})
        result["a"].mul_(3.0)  # what it returns may be written to
        assert torch.equal(result["counts"], torch.tensor([1, 2]))
        (result["a"].sum() + (result["b"] ** 2).sum() + x.sum()).backward()
        assert x.grad is not None and y.grad is not None
        return [result["a"], result["b"], x.grad, y.grad]

    plain = run(lambda given: swap(given, scale=0.5))
    pointed = run(lambda given: zbpp.overlap_point(swap, given, scale=0.5))
    assert all(map(torch.equal, plain, pointed))


# ---- Layers of two processes, which communicate by real all-to-alls.


def exchanged(group: Any, functional: bool, x: Tensor) -> Tensor:
    """Equal shares to both processes; torch's functional call does not wait for it."""
    from torch.distributed._functional_collectives import all_to_all_single

    if functional:
        return all_to_all_single(x, None, None, group)
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x.contiguous(), group=group)
    return y


def mixed(mode: str, *, overlap: bool, functional: bool = False) -> Any:
    """Results, parameters and the order of collectives of two replicas."""
    log, send = Log(), partial(exchanged, dist.new_group([0, 1]), functional)
    layers = [Layer(index, log, index, send=send) for index in range(2)]
    with pipeline_of(
        layers,
        mode if mode == "DualPipeV" else plan_in_parts(mode, **IN_PARTS),
        n_stages=None,
        mesh=zbpp.mesh(stages=1, data_parallel=2),
        execution=zbpp.Execution(overlap=overlap),
    ) as pipeline:
        results = [pipeline.step(*batch(step)) for step in range(2)]
        numbers = [(result.loss, result.grad_norm) for result in results]
        parameters = [p.detach().clone() for _, p in pipeline.named_parameters()]
    return numbers, parameters, [name for _, name in log.communicated]


def mixed_in_turn(cases: list[dict[str, Any]]) -> list[Any]:
    return [mixed(overlap=overlap, **case) for case in cases for overlap in (1, 0)]


@pytest.mark.dist
def test_real_exchanges_give_the_same_bits_in_one_order(pool: Pool) -> None:
    cases = [
        {"mode": "DualPipeV"},
        {"mode": "ZB"},
        {"mode": "DualPipeV", "functional": True},
    ]
    first, second = pool.run(mixed_in_turn, 2, cases)
    assert [x[2] for x in first] == [x[2] for x in second], "the ranks issue alike"
    for ranks in (first, second):
        for turns, row in zip(ranks[::2], ranks[1::2], strict=True):
            assert turns[0] == row[0]
            assert all(map(torch.equal, turns[1], row[1]))
            assert sorted(turns[2]) == sorted(row[2])
            assert turns[2] != row[2]


# ---- Sums.


def trained(plan: Any) -> list[Tensor]:
    layers = [Layer(i, Log(), 0) for i in range(2)]
    with pipeline_of(layers, plan) as pipeline:
        for step in range(2):
            pipeline.step(*batch(step))
        return [p.detach().clone() for _, p in pipeline.named_parameters()]


def test_w_waits_while_gradients_of_an_early_b_are_stored() -> None:
    """Parts of W1 stand between those of B4, and W2 runs before the turn of B4."""
    plan = plan_in_parts("ZB", **IN_PARTS)
    (planned,) = plan.schedule.parts
    numbers = (0, 1, 4, 2, 3, 5)

    def parts(kind: str, microbatch: int) -> list[Any]:
        name = f"0{kind}{microbatch}"
        return [x for x in planned if isinstance(x, Part) and str(x.of) == name]

    row = [part for i in numbers for part in parts("F", i)] + parts("B", 0)
    for i, after in pairwise(numbers):  # a B's exchange, part of a W, of the B, ..
        b, w = parts("B", after), parts("W", i)
        row += [
            x for at, of_w in enumerate(w) for x in (b[2 * at], of_w, b[2 * at + 1])
        ]
    row += [*parts("W", numbers[-1]), *(x for x in planned if not isinstance(x, Part))]
    order = dict.fromkeys(x.of if isinstance(x, Part) else x for x in row)
    schedule = replace(plan.schedule, orders=(tuple(order),), parts=(tuple(row),))
    early = trained(replace(plan, schedule=schedule))
    for ours, usual in zip(early, trained("ZB"), strict=True):
        assert torch.equal(ours, usual)
