"""The same model, data and seed give the same bits under every mode."""

import math

import pytest
import torch
from small_model import (
    N_LAYERS,
    assert_same,
    batch,
    build,
    loss_fn,
    make_pipeline,
    refusal,
    train,
    train_plainly,
)
from torch import Tensor, nn
from trained_modes import MODES

from zbpp.core import Placement, Schedule, parse_job
from zbpp.runtime.optim.decision import clip_factor


@pytest.mark.parametrize("n_stages", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_a_plain_loop_bit_for_bit(mode: str, n_stages: int) -> None:
    plain_losses, plain = train_plainly()
    losses, _, parameters = train(mode, n_stages)
    assert [loss for loss, _ in losses] == plain_losses
    assert_same(parameters, plain)


def test_clipping_agrees_with_torch() -> None:
    model = nn.Sequential(*build(range(N_LAYERS)))
    loss = loss_fn(model(batch(0)[0]), batch(0)[1])
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
    pipeline = make_pipeline("ZBH1", 3, n_microbatches=1, optimizer=None)
    assert pipeline.step(*batch(0)).grad_norm == pytest.approx(norm, rel=1e-6)
    assert clip_factor(norm, 0.3) == pytest.approx(0.3 / norm, rel=1e-5)
    assert clip_factor(0.2, 0.3) == 1.0


def test_without_an_optimizer_the_gradients_are_left_to_the_caller() -> None:
    pipeline = make_pipeline("ZBV", 2, optimizer=None)
    pipeline.step(*batch(0))
    model = nn.Sequential(*build(range(N_LAYERS)))
    for inputs, targets in zip(*(x.tensor_split(6) for x in batch(0)), strict=True):
        (loss_fn(model(inputs), targets) / 6).backward()
    expected = {f"layers.{name}": p.grad for name, p in model.named_parameters()}
    assert_same({name: p.grad for name, p in pipeline.named_parameters()}, expected)


def test_passes_in_another_order_still_add_up_in_micro_batch_order() -> None:
    rows = (
        "0F2 0F0 0F1 0B2 0B1 0W1 0B0 0W2 0W0 O",
        "1F2 1BW2 1F0 1F1 1B1 1BW0 1W1 O",
    )
    orders = tuple(
        tuple(parse_job(text, stage=stage) for text in row.split())
        for stage, row in enumerate(rows)
    )
    schedule = Schedule("shuffled", Placement.single(2), 3, orders)
    _, plain = train_plainly(n_microbatches=3)
    _, _, shuffled = train(schedule, None, n_microbatches=3)
    assert_same(shuffled, plain)


def test_fewer_micro_batches_than_stages() -> None:
    plain = train_plainly(n_microbatches=1)[1]
    for mode in ("VPP", "ZBH2", "ZBV"):
        assert_same(train(mode, 4, n_microbatches=1)[2], plain)


def test_a_given_model_is_trained_in_place_and_split_as_asked() -> None:
    model = nn.Sequential(*build(range(N_LAYERS)))
    pipeline = make_pipeline("ZBH1", 3, model=model, split=(1, 6, 2))
    for step in range(3):
        pipeline.step(*batch(step))
    plain = train_plainly()[1]
    assert_same({f"layers.{n}": p.detach() for n, p in model.named_parameters()}, plain)


def test_evaluation_weighs_uneven_micro_batches_by_their_samples() -> None:
    model = nn.Sequential(*build(range(N_LAYERS)))
    inputs, targets = batch(5, samples=7)
    with torch.no_grad():
        expected = float(loss_fn(model(inputs), targets))
    pipeline = make_pipeline("ZBV", 2)
    for n_microbatches in (1, 2, 3, 7):
        value = pipeline.evaluate(inputs, targets, n_microbatches=n_microbatches)
        assert value == pytest.approx(expected, rel=1e-6)


def test_evaluation_runs_in_eval_mode_and_changes_nothing() -> None:
    pipeline = make_pipeline("ZBH1", 2, model=lambda r: build(r, dropout=0.5))
    before = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    first = pipeline.evaluate(*batch(0))
    assert first == pipeline.evaluate(*batch(0))
    assert all(layer.training for _, layer in pipeline.named_layers())
    assert_same({n: p.detach() for n, p in pipeline.named_parameters()}, before)


def test_several_tensors_may_go_from_chunk_to_chunk() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.linear(x), x.detach() * 2, torch.arange(len(x))

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            return self.linear(x[0] + x[1]) + x[2][:, None]

    torch.manual_seed(0)
    layers = [Fork(), Join()]
    data = torch.randn(4, 4)
    loss = nn.functional.mse_loss(layers[1](layers[0](data)), torch.zeros(4, 4))
    expected = torch.autograd.grad(loss, [p for m in layers for p in m.parameters()])
    pipeline = make_pipeline(
        "ZBH1", 2, model=layers, n_layers=2, n_microbatches=1, optimizer=None,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    assert pipeline.step(data, torch.zeros(4, 4)).loss == pytest.approx(loss.item())
    for (name, p), gradient in zip(pipeline.named_parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient), name


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_without_a_finite_norm_is_skipped_on_all_stages(bad: float) -> None:
    pipeline = make_pipeline("ZBH1", 3)
    pipeline.step(*batch(0))
    before = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    layer = dict(pipeline.named_layers())["layers.4"]
    handle = layer.register_full_backward_hook(
        lambda module, grads, _: (grads[0] * bad,)
    )
    result = pipeline.step(*batch(1))
    handle.remove()
    assert result.skipped
    assert_same({n: p.detach() for n, p in pipeline.named_parameters()}, before)
    counters = [s["step"] for o in pipeline.optimizers for s in o.state.values()]
    assert all(count == 1 for count in counters)
    assert not pipeline.step(*batch(2)).skipped
    changed = dict(pipeline.named_parameters())["layers.1.up.weight"]
    assert not torch.equal(changed, before["layers.1.up.weight"])


def test_a_failed_pipeline_refuses_to_go_on() -> None:
    pipeline = make_pipeline("ZBH1", 2)
    inputs, targets = batch(0)
    refusal(pipeline.step, inputs, targets[:5])
    pipeline.step(*batch(0))  # a batch that does not fit harms nothing
    inputs, targets = batch(1)
    with pytest.raises(IndexError, match="out of range") as caught:
        pipeline.step(inputs + 100, targets)
    assert "in 0F0" in caught.value.__notes__
    with pytest.raises(RuntimeError, match=r"step 1 failed .*IndexError"):
        pipeline.step(*batch(1))


def test_one_process_without_a_number_of_stages_is_one_stage() -> None:
    with pytest.warns(UserWarning, match="this process is alone and n_stages is left"):
        assert make_pipeline("ZBH1", None).schedule.n_stages == 1
