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
def test_two_levels_sum_what_one_does(pool: Pool, size: Any, n: int) -> None:
    bf16 = torch.bfloat16
    reductions = {
        "one": None,
        "two": zbpp.TwoLevel(n),
        "bf16": zbpp.Reduction(bf16),
        "two bf16": zbpp.TwoLevel(n, bf16),
    }
    for found in pool.run(compare, 4, size, reductions):
        assert 0 < found["one"]["rollbacks"] < 4
        assert difference(found["two"], found["one"], rounding=1e-5) is None
        assert difference(found["bf16"], found["one"], rounding=1e-5) is not None
        assert difference(found["bf16"], found["two bf16"], rounding=3e-2) is None


def of_modes(size: tuple[int, int], reduction: Any) -> list[dict[str, Any]]:
    """Losses and norms of modes and validations; the last one has no reduction."""
    found = []
    for mode, at_once, how in (
        ("1F1B", False, reduction),
        ("ZBH1", True, reduction),
        ("ZBV", True, reduction),
        ("ZBH1", True, zbpp.Reduction(torch.bfloat16)),
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


@pytest.mark.parametrize(("size", "n"), [(PP2_DP2, 2), (PP1_DP4, 2)])
def test_modes_have_the_same_bits(pool: Pool, size: Any, n: int) -> None:
    for first, *others, control in pool.run(of_modes, 4, size, zbpp.TwoLevel(n)):
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


def test_nodes_exchange_a_part_for_each_process(pool: Pool) -> None:
    """A layer has 97 numbers; each process of a node sends 49, padded."""
    assert pool.run(between_nodes, 4, zbpp.TwoLevel(2)) == [[(2, 49)] * 4] * 4
    assert pool.run(between_nodes, 4, zbpp.Reduction()) == [[(4, 97)] * 4] * 4


def refusal(stages: int, sizes: dict[str, int], options: dict[str, Any]) -> str:
    mesh = zbpp.mesh(stages=stages, **sizes)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    if options.pop("wrapped", False):
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer, mesh=mesh["dp"])
    try:
        with zbpp.Pipeline(
            layers,
            "1F1B",
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.SGD,
            n_microbatches=2,
            device="cpu",
            mesh=zbpp.DataParallel(mesh=mesh, **options),
        ):
            return ""
    except zbpp.RequestError as error:
        return str(error)


DP4 = {"data_parallel": 4}
REFUSED: list[tuple[dict[str, int], dict[str, Any], str]] = [
    (DP4, {"reduction": "two"}, "give a zbpp.Reduction"),
    (DP4, {"reduction": zbpp.TwoLevel(2), "shard": "optimizer"}, "replicate="),
    (DP4, {"reduction": zbpp.Reduction(torch.bfloat16), "wrapped": True}, "sums its"),
    (DP4, {"reduction": zbpp.TwoLevel(3)}, r"\[0, 1, 2\], \[3\]; give another"),
    (
        {"data_parallel": 2, "expert_parallel": 2},
        {"reduction": zbpp.TwoLevel(2)},
        "this one has dp, ep",
    ),
    (DP4, {"reduction": zbpp.TwoLevel(2)}, ""),
]


@pytest.mark.parametrize(("sizes", "options", "text"), REFUSED)
def test_what_does_not_combine_is_refused(
    pool: Pool, sizes: Any, options: Any, text: str
) -> None:
    import re

    for words in pool.run(refusal, 4, 1, sizes, options):
        assert bool(words) == bool(text) and re.search(text, words)
        assert "\n" not in words


def test_values_are_checked() -> None:
    for make, text in (
        (partial(zbpp.TwoLevel, 0), "ranks_per_node is 0"),
        (partial(zbpp.TwoLevel, True), "ranks_per_node is True"),
        (partial(zbpp.Reduction, torch.int8), "dtype is torch.int8"),
        (partial(zbpp.TwoLevel, 2, "bf16"), "dtype is 'bf16'"),
    ):
        with pytest.raises(zbpp.RequestError, match=text):
            make()
