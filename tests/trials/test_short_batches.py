"""The last batch of an epoch: it may have fewer samples than there are micro-batches.

    samples        0 1 2            0 1 2 | 3      replicas of other sizes
    micro-batches  0 1 2 (3)        0 1 2 (3) | 0 (1) (2) (3)

Micro-batches without samples do not run. Between replicas they do, with weight 0, as
layers may communicate within a pass.
"""

import copy
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zbpp

DIM, M = 6, 4
X, Y = torch.randn((2, 16, DIM), generator=torch.Generator().manual_seed(0))
SIZES = (8, 3, 16, 1, 5)
"""Of the batches of a training: full ones before and after those that are short."""

mse = nn.functional.mse_loss


def layers(n: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    shape = nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten()
    return [nn.Sequential(nn.Linear(DIM, DIM), *copy.deepcopy(shape)) for _ in range(n)]


def make(mode: Any = "ZBH1", n_stages: int | None = 2, **more: Any) -> zbpp.Pipeline:
    return zbpp.Pipeline(
        nn.Sequential(*layers(8 if mode == "DualPipeV" else 4)),
        mode,
        loss_fn=mse,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.05),
        n_stages=n_stages,
        n_microbatches=M,
        clip_grad_norm=0.2,  # so that speculative steps are rolled back, too
        **more,
    )


def plain(n_layers: int = 4) -> tuple[list[float], dict[str, Tensor]]:
    """The loop over as many micro-batches as there are samples for."""
    model = nn.Sequential(*layers(n_layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for n in SIZES:
        m, x, y = min(M, n), X[:n], Y[:n]
        parts = zip(x.tensor_split(m), y.tensor_split(m), strict=True)
        losses.append(0.0)
        for a, b in parts:
            loss = mse(model(a), b)
            (loss * (len(a) / n)).backward()
            losses[-1] += loss.item() * len(a) / n
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


def train(mode: str, n_stages: int | None = 2) -> tuple[list[float], dict[str, Tensor]]:
    pipeline = make(mode, n_stages)
    losses = []
    for n in SIZES:
        reads_none = not (pipeline.needs_inputs or pipeline.needs_targets)
        x, y = (None, None) if reads_none else (X[:n], Y[:n])
        losses.append(pipeline.step(x, y).loss)
    state = pipeline.state_dict()["model"]
    pipeline.close()
    return losses, {name: x.clone() for name, x in state.items()}


def check(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV", "DualPipeV"])
def test_a_short_batch_trains_as_a_loop_over_its_samples(mode: str) -> None:
    """Statistics of BatchNorm, too: nothing runs for samples that are not there."""
    check(train(mode), plain(8 if mode == "DualPipeV" else 4))


@pytest.mark.dist
@pytest.mark.parametrize(("mode", "n"), [("ZBV", 2), ("ZBH1", 3)])
def test_ranks_without_the_batch_leave_out_the_same(
    pool: Pool, mode: str, n: int
) -> None:
    losses, state = plain()
    ranks = pool.run(train, n, mode, None)
    for rank in ranks:
        check(rank[0], losses)
    check({name: x for _, part in ranks for name, x in part.items()}, state)


def test_a_loader_keeps_its_last_batch() -> None:
    pipeline, results = make("1F1B"), []
    for x, y in DataLoader(TensorDataset(X[:11], Y[:11]), batch_size=8):
        results.append(pipeline.step(x, y, return_outputs=True))
    assert [len(result.outputs) for result in results] == [8, 3]
    assert results[1].losses[3] == 0.0 and results[1].loss == pytest.approx(
        sum(results[1].losses) / 3
    )


def answers(mode: str, n_stages: int | None) -> list[Any]:
    """Of requests of any size: what is predicted, and the mean loss."""
    pipeline = make(mode, n_stages)
    found = []
    for n in (1, 3, 4, 5, 9):
        predicted = pipeline.predict(X[:n], everywhere=True)
        found.append((predicted, pipeline.evaluate(X[:n], Y[:n])))
    pipeline.close()
    return found


def right_answers() -> list[Any]:
    whole = nn.Sequential(*layers()).eval()
    with torch.no_grad():
        return [
            (whole(X[:n]), mse(whole(X[:n]), Y[:n]).item()) for n in (1, 3, 4, 5, 9)
        ]


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_requests_of_any_size(mode: str) -> None:
    check(answers(mode, 2), right_answers())


@pytest.mark.dist
def test_requests_of_any_size_between_processes(pool: Pool) -> None:
    for found in pool.run(answers, 2, "1F1B", None):
        check(found, right_answers())


def on_replicas(shares: list[int], shard: str) -> Any:
    """One step of two replicas; the parameters after it."""
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    torch.manual_seed(0)
    linear = [nn.Linear(DIM, DIM) for _ in range(4)]
    pipeline = zbpp.Pipeline(
        linear,
        "1F1B",
        loss_fn=mse,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        n_microbatches=M,
        mesh=zbpp.DataParallel(mesh=mesh, shard=shard),
    )
    first = sum(shares[: pipeline.place.replica])
    mine = slice(first, first + shares[pipeline.place.replica])
    try:
        losses = [
            pipeline.evaluate(X[mine], Y[mine]),
            pipeline.step(X[mine], Y[mine]).loss,
        ]
    except zbpp.RequestError as error:
        return str(error)
    losses.append(len(pipeline.predict(X[mine])))
    weights = [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for _, p in pipeline.named_parameters()
    ]
    pipeline.close()
    return losses, weights


@pytest.mark.dist
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_replicas_have_shares_of_any_size(pool: Pool, shard: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    loss = mse(model(X[:6]), Y[:6])
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for n, (losses, weights) in zip(
        (5, 1), pool.run(on_replicas, 2, [5, 1], shard), strict=True
    ):
        check(losses, [loss.item(), loss.item(), n])
        check(weights, [p.detach() for p in model.parameters()])


@pytest.mark.dist
def test_a_replica_without_samples_is_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"no samples.*drop_last=True"):
        pool.run(on_replicas, 2, [8, 0], "none")
