"""What a pipeline reads and returns: batches of any shape, losses, metrics, outputs."""

import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_models import N_LAYERS
from cases import Case, make, plain
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._pytree import register_dataclass
from torch.utils.data import DataLoader, TensorDataset

import zbpp
from zbpp import diagnostics
from zbpp.models import Layered

M = 4
VECTORS = Case(model="vectors", mode="ZBV")
TOKENS = Case(model="lm", mode="ZBV", weigh="tokens", optimizer=None)


def layers(case: Case) -> nn.Sequential:
    return nn.Sequential(*case.of.layers())


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# ---- Batches.


def test_a_list_has_micro_batches_of_any_size() -> None:
    """Targets of a list may have another shape: one for each token."""
    inputs, targets = TOKENS.batch(0)
    whole = make(TOKENS).step(inputs, targets)
    parts = [x.split([2, 2, 2, 2]) for x in (inputs, targets)]
    assert make(TOKENS).step(*map(list, parts)).losses == whole.losses
    flat = [part.flatten() for part in parts[1]]
    loss_fn = lambda y, t: case_loss(y, t.view(y.shape[:2]))  # noqa: E731
    case_loss = TOKENS.of.loss_fn
    pipeline = make(TOKENS, loss_fn=loss_fn)
    assert pipeline.step([*parts[0]], flat).losses == whole.losses
    uneven = [[*x.split([3, 1, 2, 2])] for x in (inputs, targets)]
    pipeline = make(TOKENS)
    close(pipeline.step(*uneven).loss, whole.loss)
    close(pipeline.evaluate(*uneven), whole.loss)


@dataclass
class Data:
    """A dataclass, with the names of the batch below."""

    ids: Tensor
    both: Any
    rate: float
    scale: Tensor


register_dataclass(Data)


class Ends(nn.Linear):
    """The last layer, which puts out containers."""

    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x), "rest": Data(x[:, 0], (x, None), 0.5, x)}


class Reads(nn.Module):
    """Reads a nested batch, whose numbers and tensors without samples stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, batch: Any) -> Tensor:
        names = ("ids", "both", "rate", "scale")
        read = getattr if isinstance(batch, Data) else getitem
        ids, (both, (_, none)), rate, scale = (read(batch, name) for name in names)
        assert none is None and rate == 0.5 and len(ids) == len(both)
        return self.linear(both * rate * scale)


@pytest.mark.parametrize("kind", [dict, lambda batch: Data(**batch)])
def test_containers_are_cut_and_joined(kind: Callable[[Any], Any]) -> None:
    batch = {
        "ids": torch.arange(7),
        "both": (torch.randn(7, 2), [torch.zeros(7), None]),
        "rate": 0.5,
        "scale": torch.tensor(2.0),
    }
    torch.manual_seed(0)
    model = [Reads(), Ends(2, 2)]
    loss_fn = lambda outputs, targets: mse_loss(outputs["y"], targets)  # noqa: E731
    pipeline = zbpp.Pipeline(
        model, "1F1B", n_stages=2, n_microbatches=3, loss_fn=loss_fn, optimizer=None
    )
    expected = model[1](model[0](batch))
    found = pipeline.predict(kind(batch))
    close(found["y"], expected["y"])
    assert type(found["rest"]) is Data and found["rest"].both[1] is None
    close(found["rest"].both[0], expected["rest"].both[0])
    result = pipeline.step(kind(batch), torch.zeros(7, 2))
    close(result.loss, loss_fn(expected, torch.zeros(7, 2)).item())
    with pytest.raises(
        zbpp.RequestError, match=r"a UserDict without .*register_pytree"
    ):
        pipeline.predict(UserDict(batch))


def test_a_model_may_cut_its_batch() -> None:
    case = Case(model="dicts", mode="ZBV", optimizer=None)
    inputs, labels = case.batch(1)
    layered = Layered(
        N_LAYERS,
        case.of.build,
        loss_fn=case.of.loss_fn,
        cut_batch=lambda batch: (
            {name: x for name, x in batch.items() if name != "labels"},
            batch.get("labels"),
        ),
    )
    pipeline = zbpp.Pipeline(
        layered, "ZBV", n_stages=2, n_microbatches=M, optimizer=None
    )
    whole = {**inputs, "labels": labels}
    assert len(diagnostics.profile(pipeline, whole, rounds=1).layers.f) == N_LAYERS
    assert pipeline.step(whole).losses == make(case).step(inputs, labels).losses
    assert torch.equal(
        pipeline.predict(inputs)["logits"], pipeline.predict(whole)["logits"]
    )


def test_a_loader_keeps_its_last_batch() -> None:
    x, y = VECTORS.of.batch(0, 13)
    pipeline = make(VECTORS)
    results = [
        pipeline.step(*batch, return_outputs=True)
        for batch in DataLoader(TensorDataset(x, y), batch_size=8)
    ]
    assert [len(result.outputs) for result in results] == [8, 5]
    first, *others = results[1].losses
    close(results[1].loss, (2 * first + sum(others)) / 5)


# ---- Evaluations and predictions.


def test_outputs_that_cannot_be_joined_are_a_list() -> None:
    inputs, _ = TOKENS.batch(0)
    parts = [inputs[:2], inputs[2:4, :3], inputs[4:]]
    found = make(TOKENS).predict(parts, n_microbatches=3)
    assert [tuple(x.shape[:2]) for x in found] == [(2, 5), (2, 3), (4, 5)]


# ---- Results of a step.


def with_metrics(y: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
    loss = mse_loss(y, t)
    return loss, {"mae": (y - t).abs().mean().detach(), "loss": loss, "one": True}


def results(n_stages: int | None, mode: str = "ZBV", clip: float | None = None) -> Any:
    """Losses, metrics and outputs of steps and evaluations, by a loss with metrics."""
    case = Case(model="vectors", mode=mode, clip=clip)
    with make(case, n_stages=n_stages, loss_fn=with_metrics) as pipeline:
        found: list[Any] = []
        for step in range(3):
            x, y = case.of.batch(step, 7)
            result = pipeline.step(x, y, return_outputs=step == 1)
            metrics: dict[str, float] = {}
            loss = pipeline.evaluate(x, y, n_microbatches=2, metrics=metrics)
            found.append((result.loss, result.metrics, result.outputs, loss, metrics))
        return found


@pytest.mark.parametrize(("mode", "clip"), [("1F1B", None), ("ZBV", 1e-3)])
def test_metrics_are_means_like_the_loss(mode: str, clip: float | None) -> None:
    found = results(2, mode, clip)
    case = Case(model="vectors", clip=clip, samples=7)
    assert [row[0] for row in found] == plain(case)["losses"]
    for step, (loss, metrics, outputs, evaluated, of_evaluation) in enumerate(found):
        assert metrics["one"] == 1.0 and metrics["loss"] == loss
        assert of_evaluation["loss"] == evaluated
        assert (outputs is not None) == (step == 1)
    x, y = case.batch(0)
    close(found[0][1]["mae"], (layers(case)(x) - y).abs().mean().item())


def test_metrics_of_some_micro_batches_are_means_over_these() -> None:
    calls = iter(range(M))

    def loss_fn(y: Tensor, t: Tensor) -> Any:
        n = next(calls)
        return mse_loss(y, t), {"n": n, **({"odd": n} if n % 2 else {})}

    case = Case(model="vectors", mode="FThenB", n_stages=1)
    result = make(case, loss_fn=loss_fn).step(*case.batch(0))
    assert result.metrics == {"n": 1.5, "odd": 2.0}


@pytest.mark.dist
def test_the_last_process_has_metrics_and_outputs(pool: Pool) -> None:
    here = results(2, "ZBH1")
    first, last = pool.run(results, 2, None, "ZBH1")
    assert first == [(loss, {}, None, found, {}) for loss, _, _, found, _ in here]
    for row, expected in zip(last, here, strict=True):
        assert row[:2] == expected[:2] and row[3:] == expected[3:]
    assert torch.equal(last[1][2], here[1][2])


def test_weights_may_be_any_function() -> None:
    """A micro-batch of weight 0 has no part in the loss."""

    def weigh(targets: Tensor) -> float:
        return float((targets[:, 0, 0] > 0).sum())

    pipeline = make(VECTORS, numerics=zbpp.Numerics(weigh=weigh))
    x, y = VECTORS.batch(0)
    y[:2] = -1.0
    result = pipeline.step(x, y)
    weights = [weigh(part) for part in y.chunk(M)]
    pairs = zip(result.losses, weights, strict=True)
    close(result.loss, sum(loss * w for loss, w in pairs) / sum(weights))


def test_a_micro_batch_without_tokens_is_skipped() -> None:
    """It has no mean: in plain torch it would be NaN."""
    inputs, targets = TOKENS.of.batch(0, M)
    targets[1] = -100
    pipeline = make(TOKENS)
    result = pipeline.step(inputs, targets)
    assert result.losses[1] == 0.0 and pipeline.evaluate(inputs, targets) == result.loss
    rest = make(TOKENS, n_microbatches=3)
    others = [0, 2, 3]
    assert rest.step(inputs[others], targets[others]).loss == result.loss
    expected = dict(rest.named_parameters())
    for name, p in pipeline.named_parameters():
        assert torch.equal(p.grad, expected[name].grad), name


def test_a_batch_without_tokens_changes_no_parameter() -> None:
    inputs, targets = TOKENS.of.batch(0, M)
    pipeline = make(TOKENS)
    result = pipeline.step(inputs, targets.fill_(-100))
    assert math.isnan(result.loss) and result.grad_norm == 0.0
    assert all(not p.grad.any() for _, p in pipeline.named_parameters())


# ---- Layers and processes.


def layers_built(mode: str) -> list[int]:
    """Indices of the layers that this process has made."""
    built: list[int] = []

    def build(indices: range) -> list[nn.Module]:
        built.extend(indices)
        return VECTORS.of.build(indices)

    n = 2 if not dist.is_initialized() else None
    zbpp.Pipeline(
        zbpp.layers_from(build, n_layers=7), mode, n_stages=n, n_microbatches=M,
        loss_fn=mse_loss, optimizer=None,
    ).close()  # fmt: skip
    return built


@pytest.mark.dist
def test_a_process_builds_only_the_layers_of_its_stages(pool: Pool) -> None:
    """The outer chunks have one layer more."""
    assert layers_built("ZBV") == [*range(7)]
    assert pool.run(layers_built, 2, "1F1B") == [[0, 1, 2, 3], [4, 5, 6]]
    assert pool.run(layers_built, 2, "ZBV") == [[0, 1, 5, 6], [2, 3, 4]]


def on_replicas(shares: list[int], shard: str) -> Any:
    """An evaluation and a step of replicas with so many samples; the parameters."""
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    replica = mesh.get_local_rank("dp")
    pipeline = zbpp.Pipeline(
        VECTORS.of.layers(),
        "1F1B",
        loss_fn=mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        n_microbatches=M,
        mesh=zbpp.DataParallel(mesh=mesh, shard=shard),
    )
    x, y = (part.split(shares)[replica] for part in VECTORS.of.batch(0, sum(shares)))
    losses = [pipeline.evaluate(x, y), pipeline.step(x, y).loss]
    assert len(pipeline.predict(x)) == len(x)
    with pipeline:
        model = pipeline.named_parameters()
        return losses, {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in model
        }


@pytest.mark.dist
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_replicas_have_shares_of_any_size(pool: Pool, shard: str) -> None:
    model = layers(VECTORS)
    x, y = VECTORS.of.batch(0, 11)
    loss = mse_loss(model(x), y)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = dict(model.named_parameters(prefix="layers"))
    for losses, parameters in pool.run(on_replicas, 2, [7, 4], shard):
        close(losses, [loss.item()] * 2)
        close(parameters, {name: p.detach() for name, p in expected.items()})


@pytest.mark.dist
def test_a_replica_with_too_few_samples_is_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"3 samples for 4.*drop_last=True"):
        pool.run(on_replicas, 2, [8, 3], "none")
