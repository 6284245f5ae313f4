"""Reductions of gradients over replicas: sums, bits over modes, refusals."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from same import difference
from torch import nn

import zbpp

pytestmark = pytest.mark.dist

PP2_DP2, PP1_DP4 = (2, 2), (1, 4)
WIDTH, M = 6, 4


def pipeline(
    size: tuple[int, int], mode: str = "ZBH1", reduction: Any = None, **more: Any
) -> zbpp.Pipeline:
    """A pipeline of layers that have 97 parameters, which no node divides."""
    torch.manual_seed(0)
    stages, replicas = size
    layers = [nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)) for _ in range(4)]
    mesh = zbpp.mesh(stages=stages, data_parallel=replicas)
    options = {} if reduction is None else {"reduction": reduction}
    settings: dict[str, Any] = {
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "clip_grad_norm": 0.7,
        "step": zbpp.StepPolicy(post_validation=True),
    }
    return zbpp.Pipeline(
        layers,
        mode,
        loss_fn=nn.functional.mse_loss,
        n_microbatches=M,
        device="cpu",
        mesh=zbpp.DataParallel(mesh=mesh, **options),
        **settings | more,
    )


def batch(pipe: zbpp.Pipeline, step: int) -> torch.Tensor:
    """This replica's samples; some steps are clipped, and others are not."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, WIDTH, generator=generator) * (1.5 if step % 2 else 0.5)
    return x.chunk(pipe.place.n_replicas)[pipe.place.replica]


def trained(pipe: zbpp.Pipeline, steps: range) -> dict[str, Any]:
    """Losses, rollbacks and parameters of this stage."""
    found: dict[str, Any] = {"losses": [], "norms": [], "rollbacks": 0}
    for step in steps:
        x = batch(pipe, step)
        result = pipe.step(x, x.roll(1, 1))
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        found["rollbacks"] += result.rollbacks
    pipe.synchronize()
    numbers = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return found | {"numbers": numbers}


def compare(size: tuple[int, int], reductions: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, reduction in reductions.items():
        with pipeline(size, reduction=reduction) as pipe:
            found[name] = trained(pipe, range(4))
    return found


@pytest.mark.parametrize(("size", "n"), [(PP2_DP2, 1), (PP2_DP2, 2), (PP1_DP4, 2)])
def test_reductions_give_the_sums_of_an_all_reduce(
    pool: Pool, size: Any, n: int
) -> None:
    bf16 = torch.bfloat16
    reductions = {
        "one": None,
        "two": zbpp.TwoLevel(n),
        "bf16": zbpp.Reduction(dtype=bf16),
        "two bf16": zbpp.TwoLevel(n, dtype=bf16),
        "all": zbpp.TopK(1.0),
        "some": zbpp.TopK(0.5),
    }
    for found in pool.run(compare, 4, size, reductions):
        assert 0 < found["one"]["rollbacks"] < 4
        assert difference(found["two"], found["one"], rounding=1e-5) is None
        assert difference(found["bf16"], found["one"], rounding=1e-5) is not None
        assert difference(found["bf16"], found["two bf16"], rounding=3e-2) is None
        assert difference(found["all"], found["one"], rounding=1e-5) is None
        assert difference(found["some"], found["one"], rounding=3e-2) is not None


def of_modes(size: tuple[int, int], reduction: Any) -> list[dict[str, Any]]:
    """Losses and norms of modes and validations; the last one has no reduction."""
    found = []
    for mode, at_once, how in (
        ("1F1B", False, reduction),
        ("ZBH1", True, reduction),
        ("ZBV", True, reduction),
        ("ZBH1", True, zbpp.Reduction(dtype=torch.bfloat16)),
    ):
        step = zbpp.StepPolicy(post_validation=at_once)
        with pipeline(size, mode, how, step=step) as pipe:
            numbers = trained(pipe, range(4))
            parts = pipe.gather(numbers.pop("numbers"))
            rollbacks = numbers.pop("rollbacks")
            assert (rollbacks > 0) == at_once
            numbers["numbers"] = {k: v for part in parts for k, v in part.items()}
        found.append(numbers)
    return found


@pytest.mark.parametrize(
    ("size", "reduction"),
    [
        (PP2_DP2, zbpp.TwoLevel(2)),
        (PP1_DP4, zbpp.TwoLevel(2)),
        (PP2_DP2, zbpp.TopK(0.1)),
        (PP1_DP4, zbpp.TopK(0.1, dtype=torch.bfloat16)),
    ],
)
def test_modes_have_the_same_bits(pool: Pool, size: Any, reduction: Any) -> None:
    for first, *others, control in pool.run(of_modes, 4, size, reduction):
        assert [difference(one, first) for one in others] == [None, None]
        assert difference(control, first) is not None


def between_nodes(reduction: Any) -> list[tuple[int, int]]:
    """Ranks and numbers of each all-reduce of gradients in a step."""
    found, all_reduce = [], dist.all_reduce
    with pipeline(PP1_DP4, "1F1B", reduction, clip_grad_norm=None) as pipe:
        x = batch(pipe, 0)

        def noted(tensor: torch.Tensor, **options: Any) -> Any:
            found.append((options["group"].size(), tensor.numel()))
            return all_reduce(tensor, **options)

        dist.all_reduce = noted
        try:
            pipe.step(x, x)
        finally:
            dist.all_reduce = all_reduce
    return found


def test_two_levels_send_one_part_per_process_between_nodes(pool: Pool) -> None:
    """A layer has 97 numbers; each process of a node sends 49, padded."""
    assert pool.run(between_nodes, 4, zbpp.TwoLevel(2)) == [[(2, 49)] * 4] * 4
    assert pool.run(between_nodes, 4, zbpp.Reduction()) == [[(4, 97)] * 4] * 4


# ---- Residuals.


class Shift(nn.Module):
    """Adds its weight: a mean squared error is a quadratic in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def clear_residuals(pipe: zbpp.Pipeline) -> None:
    for x in pipe.state_dict()["residuals"].values():
        x.to_local().zero_()


def distances(n_steps: int) -> tuple[float, float]:
    """With residuals, and without them."""
    return distance(True, n_steps), distance(False, n_steps)


def distance(feedback: bool, n_steps: int) -> float:
    """From the optimum, of a quadratic whose largest gradients cancel out.

    Each replica sends one number of ten, and wants that one to be 2 or -2.
    """
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    with zbpp.Pipeline(
        [Shift(), Shift()],
        "ZBH1",
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        n_microbatches=2,
        device="cpu",
        mesh=zbpp.DataParallel(mesh=mesh, reduction=zbpp.TopK(0.1)),
    ) as pipe:
        wanted = torch.ones(4, 10)
        wanted[:, 0] = 2.0 if pipe.place.replica else -2.0
        for step in range(n_steps):
            for one in pipe.optimizers:
                one.param_groups[0]["lr"] = 0.3 / (1 + step / 20)
            pipe.step(torch.zeros(4, 10), wanted)
            if not feedback:
                clear_residuals(pipe)
        here = dict(pipe.named_parameters()).values()
        total = sum(pipe.gather(sum(p.detach() for p in here)))
    return float((total / 2 - wanted.mean(0).new_ones(10))[1:].abs().max())


def test_a_quadratic_converges_by_its_residuals_alone(pool: Pool) -> None:
    for with_residuals, without in pool.run(distances, 4, 100):
        assert with_residuals < 0.05 and without == 1.0


def state_of(pipe: zbpp.Pipeline) -> dict[str, Any]:
    """Parameters and residuals of this stage; all its replicas must call."""
    state = pipe.state_dict()
    whole = {k: x.full_tensor().clone() for k, x in state["residuals"].items()}
    return {
        "residuals": whole,
        "model": {k: x.clone() for k, x in state["model"].items()},
    }


TOP = zbpp.TopK(0.1)


def with_a_bad_step(mode: str, at_once: bool) -> list[dict[str, Any]]:
    """States after four steps: without a step that is NaN, with it, and otherwise."""
    found = []
    for bad in (None, 2, "cleared"):
        step = zbpp.StepPolicy(post_validation=at_once)
        with pipeline(PP2_DP2, mode, TOP, step=step) as pipe:
            for number in range(4):
                x = batch(pipe, number)
                if number == bad:
                    result = pipe.step(x * torch.nan, x)
                    assert result.skipped and result.rollbacks == at_once
                if number == 2 and bad == "cleared":
                    clear_residuals(pipe)
                pipe.step(x, x.roll(1, 1))
            found.append(state_of(pipe))
    return found


@pytest.mark.parametrize(("mode", "at_once"), [("ZBV", True), ("1F1B", False)])
def test_residuals_of_a_skipped_step_are_rolled_back(
    pool: Pool, mode: str, at_once: bool
) -> None:
    for expected, found, cleared in pool.run(with_a_bad_step, 4, mode, at_once):
        assert all(x.abs().sum() > 0 for x in expected["residuals"].values())
        assert difference(found, expected) is None
        assert difference(cleared, expected) is not None


def resumed(folder: str) -> list[dict[str, Any]]:
    """States of a run, of one that resumes from a checkpoint, and a wrong one."""
    found = []
    with pipeline(PP2_DP2, "ZBH1", TOP) as pipe:
        trained(pipe, range(2))
        pipe.save(folder, wait=True)
        trained(pipe, range(2, 4))
        found.append(state_of(pipe))
    for is_cleared in (False, True):
        with pipeline(PP2_DP2, "1F1B", TOP) as pipe:
            pipe.load(folder)
            if is_cleared:
                clear_residuals(pipe)
            trained(pipe, range(2, 4))
            found.append(state_of(pipe))
    return found


def elsewhere(folder: str) -> None:
    """Four replicas load from two, and from a run without residuals."""
    with pipeline(PP2_DP2, "ZBH1", TOP) as pipe:
        trained(pipe, range(2))
        pipe.save(folder, wait=True)
        assert any(x.to_local().any() for x in pipe.state_dict()["residuals"].values())
    with pipeline(PP1_DP4, "ZBH1") as pipe:
        pipe.load(folder)
        assert not pipe.state_dict()["residuals"]
        pipe.save(folder + "/new", wait=True)
    with pipeline(PP1_DP4, "ZBH1", TOP) as pipe:
        for source in (folder, folder + "/new"):
            trained(pipe, range(1))
            residuals = [x.to_local() for x in pipe.state_dict()["residuals"].values()]
            assert any(x.any() for x in residuals)
            pipe.load(source)
            assert not any(x.any() for x in residuals)


def test_a_run_resumes_with_its_residuals(pool: Pool, tmp_path: Any) -> None:
    for expected, found, cleared in pool.run(resumed, 4, str(tmp_path)):
        assert difference(found, expected) is None
        assert difference(cleared, expected) is not None


def test_residuals_of_other_replicas_are_left_out(pool: Pool, tmp_path: Any) -> None:
    pool.run(elsewhere, 4, str(tmp_path))


def on_host() -> list[dict[str, Any]]:
    """States after a NaN step and others: on the device, on the host, a control."""
    found = []
    for offloads, reduction in ((False, TOP), (True, TOP), (True, zbpp.TopK(0.2))):
        step = zbpp.StepPolicy(post_validation=True, offload_optimizer=offloads)
        with pipeline(PP2_DP2, "ZBV", reduction, step=step) as pipe:
            x = batch(pipe, 0)
            found.append(trained(pipe, range(3)))
            assert found[-1]["rollbacks"] > 0
            result = pipe.step(x * torch.nan, x)
            assert result.skipped and result.rollbacks == 1
            found[-1] |= trained(pipe, range(3, 5)) | state_of(pipe)
    return found


def test_an_optimizer_on_the_host_changes_no_bit(pool: Pool) -> None:
    for on_device, found, other in pool.run(on_host, 4):
        assert difference(found, on_device) is None
        assert difference(other, on_device) is not None


# ---- Refusals.


Options = dict[str, Any]
HALF = torch.bfloat16
REFUSED: list[tuple[Options, str]] = [
    ({"reduction": "two"}, "give a zbpp.Reduction"),
    ({"reduction": zbpp.TwoLevel(2), "shard": "optimizer"}, "zbpp.mesh(replicate="),
    ({"reduction": zbpp.Reduction(dtype=HALF), "wrapped": True}, "sums its gradients"),
    ({"reduction": zbpp.TwoLevel(3)}, "have [0, 1, 2], [3]; give another"),
    ({"reduction": zbpp.TwoLevel(2), "experts": True}, "this one has dp, ep"),
    ({"reduction": TOP, "shard": "parameters"}, "fully_shard sums"),
    ({"reduction": TOP, "loss_scale": 2.0}, "loss_scale may change; leave one out"),
    ({"reduction": TOP, "sharded": True}, "is a DTensor"),
    ({"reduction": zbpp.TwoLevel(2)}, ""),
    ({"reduction": TOP}, ""),
]


def refusals() -> list[str]:
    return [refusal(dict(options)) for options, _ in REFUSED]


def refusal(options: Options) -> str:
    """The error of a pipeline of one stage, for options of `zbpp.DataParallel`."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    n = 2 if options.pop("experts", False) else 4
    mesh = zbpp.mesh(stages=1, data_parallel=n, expert_parallel=4 // n)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    step = zbpp.StepPolicy(loss_scale=options.pop("loss_scale", None))
    is_wrapped, is_sharded = (options.pop(x, False) for x in ("wrapped", "sharded"))
    for layer in layers:
        if is_wrapped:
            fully_shard(layer, mesh=mesh["dp"])
        if is_sharded:
            weight = distribute_tensor(layer.weight, mesh["tp"])
            layer.weight = nn.Parameter(weight)
    try:
        with zbpp.Pipeline(
            layers,
            "1F1B",
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.SGD,
            n_microbatches=2,
            device="cpu",
            step=step,
            mesh=zbpp.DataParallel(mesh=mesh, **options),
        ):
            return ""
    except zbpp.RequestError as error:
        return str(error)


def test_options_that_reductions_exclude_are_refused_in_one_line(pool: Pool) -> None:
    for found in pool.run(refusals, 4):
        for words, (options, text) in zip(found, REFUSED, strict=True):
            assert bool(words) == bool(text) and text in words, options
            assert "\n" not in words


def test_wrong_values_of_reductions_are_refused() -> None:
    for make, text in (
        (partial(zbpp.TwoLevel, 0), "ranks_per_node is 0"),
        (partial(zbpp.TwoLevel, True), "ranks_per_node is True"),
        (partial(zbpp.Reduction, dtype=torch.int8), "dtype is torch.int8"),
        (partial(zbpp.TopK, 0), "share is 0"),
        (partial(zbpp.TopK, 1.5), "share is 1.5"),
        (partial(zbpp.TwoLevel, 2, dtype="bf16"), "dtype is 'bf16'"),
    ):
        with pytest.raises(zbpp.RequestError, match=text):
            make()
