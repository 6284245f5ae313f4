"""Steps of a model with tied weights: the same bits wherever the layers lie."""

from collections.abc import Callable

import pytest
import torch
from pool import Pool
from small_model import (
    Block,
    adamw,
    assert_same,
    batch,
    loss_fn,
    make_pipeline,
    refusal,
)
from torch import Tensor, nn

from zbpp.pipeline import Pipeline

N_LAYERS = 8


def tied_layers(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """GPT-2's shape: the head's weight is the embedding's."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(N_LAYERS - 2)]
    layers = [nn.Embedding(11, 16), *blocks, nn.Linear(16, 11, bias=False)]
    layers[-1].weight = layers[0].weight
    return [layer.to(dtype) for layer in layers]


def tied_thrice() -> list[nn.Module]:
    """Two ties; one of them has three holders, and a module in two places."""
    layers = tied_layers()
    middle = nn.Linear(16, 16, bias=False)
    layers[2], layers[5] = middle, middle
    layers[3].up.weight = nn.Parameter(layers[3].up.weight.detach().clone())
    layers[6] = nn.Sequential(nn.Linear(16, 16, bias=False))
    layers[6][0].weight = middle.weight
    return layers


Run = tuple[list[tuple[float, float]], float, dict[str, Tensor]]


def run(
    mode: str,
    n_stages: int | None,
    *,
    make: Callable[[], list[nn.Module]] = tied_layers,
    steps: int = 4,
    **more: object,
) -> Run:
    model = make()
    settings = {"model": model, "n_layers": None, "clip_grad_norm": 0.5} | more
    pipeline = make_pipeline(mode, n_stages, **settings)
    results = [pipeline.step(*batch(step)) for step in range(steps)]
    numbers = [(result.loss, result.grad_norm) for result in results]
    loss = pipeline.evaluate(*batch(99))
    parameters = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    assert_copies_equal(pipeline)
    return numbers, loss, parameters


def assert_copies_equal(pipeline: Pipeline) -> None:
    for tie in range(len(pipeline.ties)):
        own = [
            executor.stage.ties.held[tie].parameter
            for executor in pipeline.stages.executors.values()
            if tie in executor.stage.ties.held
        ]
        assert all(torch.equal(own[0], copy) for copy in own)


def run_plainly(make: Callable[[], list[nn.Module]] = tied_layers) -> Run:
    """The tied model in a plain loop."""
    layers = make()
    model = nn.Sequential(*layers)
    optimizer = adamw(list(model.parameters()))
    numbers = []
    for step in range(4):
        inputs, targets = (x.tensor_split(6) for x in batch(step))
        losses = []
        for x, y in zip(inputs, targets, strict=True):
            losses.append(loss_fn(model(x), y))
            (losses[-1] / 6).backward()
        norm = nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)
        numbers.append(
            (float(torch.stack(losses).detach().double().mean()), float(norm))
        )
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        inputs, targets = batch(99)
        loss = float(loss_fn(model(inputs), targets))
    named = {
        f"layers.{i}.{n}": p.detach()
        for i, layer in enumerate(layers)
        for n, p in layer.named_parameters()
    }
    return numbers, loss, named


def assert_equal(left: Run, right: Run) -> None:
    assert left[0] == right[0]
    assert left[1] == right[1]
    assert_same(left[2], right[2])


PLACES = [
    ("1F1B", 2),
    ("1F1B", 4),
    ("ZBH1", 2),
    ("ZBH1", 4),
    ("ZBH2", 4),
    ("ZBV", 1),
    ("ZBV", 2),
    ("ZBV", 4),
    ("VPP", 2),
    ("VPP", 4),
]


@pytest.mark.parametrize("make", [tied_layers, tied_thrice])
def test_the_same_bits_under_every_mode_and_number_of_stages(make: object) -> None:
    expected = run("1F1B", 1, make=make)
    for mode, n_stages in PLACES:
        assert_equal(run(mode, n_stages, make=make), expected)


@pytest.mark.parametrize("make", [tied_layers, tied_thrice])
def test_it_is_the_plain_tied_model(make: object) -> None:
    ours, plain = run("ZBH1", 4, make=make), run_plainly(make)
    for (loss, norm), (its_loss, its_norm) in zip(ours[0], plain[0], strict=True):
        assert loss == pytest.approx(its_loss, rel=1e-6)
        assert norm == pytest.approx(its_norm, rel=1e-6)
    assert ours[1] == pytest.approx(plain[1], rel=1e-6)
    for name, value in plain[2].items():
        difference = (ours[2][name] - value).norm() / value.norm()
        assert float(difference) < 1e-6, name


@pytest.mark.dist
def test_in_processes(pool: Pool) -> None:
    expected = run("1F1B", 1)
    for mode in ("1F1B", "ZBH1", "ZBV"):
        first, last = pool.run(run, 2, mode, None)
        assert first[0] == last[0] == expected[0]
        assert first[1] == last[1] == expected[1]
        assert_same(first[2] | last[2], expected[2])


def test_a_checkpoint_holds_a_tied_weight_once_and_fits_any_stages(tmp_path) -> None:
    def begin(n_stages: int, mode: str = "ZBH1") -> Pipeline:
        return make_pipeline(mode, n_stages, model=tied_layers(), n_layers=None)

    whole = begin(4)
    for step in range(2):
        whole.step(*batch(step))
    whole.save(tmp_path, wait=True)
    state = whole.state_dict()
    expected = [whole.step(*batch(step)).grad_norm for step in (2, 3)]
    for n_stages, mode in ((1, "1F1B"), (2, "ZBH1"), (4, "ZBV")):
        loaded, given = begin(n_stages, mode), begin(n_stages, mode)
        loaded.load(tmp_path)
        given.load_state_dict(state)
        assert [loaded.step(*batch(s)).grad_norm for s in (2, 3)] == expected
        assert_copies_equal(loaded)


def slices(layers: list[nn.Module]) -> Callable[[range], list[nn.Module]]:
    """A builder that names no tie."""
    return lambda own: layers[own.start : own.stop]


def test_a_shared_parameter_that_nobody_has_named_is_refused() -> None:
    more = {"model": slices(tied_layers()), "n_layers": N_LAYERS}
    words = "layers 0 and 7 share a parameter"
    assert words in refusal(make_pipeline, "1F1B", 2, **more)
    make_pipeline("1F1B", 1, **more).step(*batch(0))  # in one chunk it is welcome


def test_a_model_that_is_untied_again_is_welcome() -> None:
    tied, head = tied_layers(), nn.Linear(16, 11, bias=False)
    head.weight = nn.Parameter(tied[0].weight.detach().clone())
    untied = [*tied[:-1], head]  # the model's own head is tied still
    make_pipeline("1F1B", 2, model=untied, n_layers=N_LAYERS).step(*batch(0))
