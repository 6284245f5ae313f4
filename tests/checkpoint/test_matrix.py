"""A run goes on in any other place: schedule, stages, mesh, process, plain model.

    run A, steps 0-2 | save | run B, steps 3-5      has what one run of six steps has

The state is read by a plain model, so each comparison also shows that one can load it.
"""

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from pool import Pool
from saved_runs import (
    CLIP,
    EXTRA,
    N_LAYERS,
    SAVED_AFTER,
    STEPS,
    M,
    Numbers,
    Place,
    batch,
    layers,
    make,
    state_in,
    train,
    train_plainly,
    two_groups,
)
from torch import Tensor, nn

import zbpp
from zbpp.checkpoint import load, newest, read_model


def run(pool: Pool, place: Place, *args: Any) -> tuple[Numbers, int]:
    if not place.apart:
        return train(place, *args)
    ranks = pool.run(train, place.n_ranks, place, *args)
    assert len({repr(numbers) for numbers, _ in ranks}) == 1
    return ranks[0]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: Any) -> Callable[..., tuple[Numbers, Path]]:
    """An undisturbed run: its numbers, and where its end is; each is done once."""

    @functools.cache
    def run_once(place: Place, drops: bool, end: int) -> tuple[Numbers, Path]:
        folder = tmp_path_factory.mktemp("whole")
        numbers, rollbacks = run(pool, place, drops, str(folder), end)
        clipped = {norm > CLIP for _, norm in numbers}
        assert end < STEPS or (rollbacks > 1 and len(clipped) == 2), "too easy"
        return numbers, folder

    return run_once


ONE = Place("1F1B", 1)
MESH = Place("ZBV", 2, True, 2, "optimizer")
ROWS = [
    (Place("ZBV", 4), Place("ZBH1", 3)),
    (Place("VPP", 2), "plain"),
    (Place("1F1B", 2, split=(2, 6)), Place("ZBV", 2)),
    (Place("ZBV", 2, True), Place("ZBH1", 3, True)),
    (ONE, Place("ZBV", 2, True, 2, "parameters")),
]
SLOW_ROWS = [
    (Place("ZBV", 4, True), "plain"),
    (Place("VPP", 2, True), Place("ZBH1", 4, True)),
    (MESH, MESH._replace(mode="ZBH1")),
    (MESH, Place("ZBH1", 4, True)),
    (MESH, Place("1F1B", 1, True, 4, "parameters")),
    (MESH, ONE),
    (MESH, "plain"),
]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_ROWS)],
    ids=str,
)
def test_a_run_goes_on_elsewhere(
    saved: Place,
    loaded: Place | str,
    pool: Pool,
    whole: Callable[..., tuple[Numbers, Path]],
    tmp_path: Path,
) -> None:
    """Replicas add gradients in an order of their own, which rounds in another way."""
    is_plain = isinstance(loaded, str)
    replicas = {saved.replicas, 1 if is_plain else loaded.replicas}
    drops = replicas == {1} and not is_plain
    reference = saved if replicas == {saved.replicas} != {1} else ONE
    numbers, end = whole(reference, drops, STEPS)
    run(pool, saved, drops, str(tmp_path / "half"), SAVED_AFTER)
    if is_plain:
        found = train_plainly(end, tmp_path / "half")
    else:
        args = (drops, str(tmp_path / "end"), STEPS, str(tmp_path / "half"))
        found, _ = run(pool, loaded, *args)
    if len(replicas) == 1 and not is_plain:
        half = whole(reference, drops, SAVED_AFTER)[1]
        assert_same(state_in(tmp_path / "half", drops), state_in(half, drops))
        assert found == numbers[SAVED_AFTER:]
        assert_same(state_in(tmp_path / "end", drops), state_in(end, drops))
        return
    torch.testing.assert_close(found, numbers[SAVED_AFTER:], rtol=1e-4, atol=1e-6)
    if not is_plain:
        expected = state_in(end, drops)
        for name, value in state_in(tmp_path / "end", drops).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_a_state_in_memory_goes_on_too(
    whole: Callable[..., tuple[Numbers, Path]], tmp_path: Path
) -> None:
    numbers, end = whole(ONE, True, STEPS)
    pipeline, schedulers = make(Place("ZBH1", 2), True)
    found: Numbers = []
    for step in range(STEPS):
        if step == 2:
            pipeline.load_state_dict(pipeline.state_dict())
        if step == SAVED_AFTER:
            other, schedulers = make(Place("ZBV", 2), True)
            other.load_state_dict(pipeline.state_dict())
            pipeline.close()
            pipeline = other
        result = pipeline.step(*batch(step))
        found.append((result.loss, result.grad_norm))
        for one in schedulers:
            one.step()
    pipeline.save(tmp_path, extra=EXTRA, wait=True)
    pipeline.close()
    assert found == numbers
    assert_same(state_in(tmp_path, True), state_in(end, True))


FORGET: dict[str, Callable[[zbpp.Pipeline, list[Any]], object]] = {
    "moments": lambda pipeline, _: pipeline.optimizers[0].state.clear(),
    "betas": lambda pipeline, _: (
        pipeline.optimizers[0].param_groups[0].update(betas=(0.9, 0.9))
    ),
    "scheduler": lambda _, schedulers: setattr(schedulers[0], "last_epoch", 0),
    "buffers": lambda pipeline, _: dict(pipeline.named_buffers())["2.mean"].zero_(),
}


@pytest.mark.parametrize("what", FORGET)
def test_a_part_that_is_not_restored_is_noticed(
    what: str, whole: Callable[..., tuple[Numbers, Path]], tmp_path: Path
) -> None:
    """The negative control: each part of the state makes a difference."""
    half = str(whole(ONE, True, SAVED_AFTER)[1])
    train(ONE, True, str(tmp_path), STEPS, half, FORGET[what])
    with pytest.raises(AssertionError):
        assert_same(
            state_in(tmp_path, True), state_in(whole(ONE, True, STEPS)[1], True)
        )


def test_trained_parameters_alone_go_on_from_the_same_base(tmp_path: Path) -> None:
    def make_frozen(n_stages: int, rest: float = 1.0) -> zbpp.Pipeline:
        model = layers(False)
        for layer in model[1:-1:2]:
            layer.linear.requires_grad_(False)
        model[0].linear.bias.data *= rest
        return zbpp.Pipeline(
            model, "ZBH1", loss_fn=nn.functional.mse_loss, optimizer=two_groups,
            n_stages=n_stages, n_microbatches=M,
        )  # fmt: skip

    def losses(pipeline: zbpp.Pipeline, n: int) -> list[float]:
        return [pipeline.step(*batch(0)).loss for _ in range(n)]

    with make_frozen(2) as pipeline:
        first = losses(pipeline, 2)
        pipeline.save(tmp_path, trainable_only=True, wait=True)
        rest = losses(pipeline, 2)
    names = {name for name, p in pipeline.named_parameters() if p.requires_grad}
    assert read_model(tmp_path).keys() == names
    with make_frozen(1, rest=5.0) as other:
        other.load(tmp_path)
        assert losses(other, 2) == rest != first
    full, _ = make(ONE, False)
    with pytest.raises(zbpp.RequestError, match=r"1\.linear\.weight is missing"):
        full.load(tmp_path)


def test_weights_for_inference(
    whole: Callable[..., tuple[Numbers, Path]],
) -> None:
    """Also into two places."""
    model = nn.ModuleDict({"a": layers(True), "b": layers(True)})
    folder = whole(ONE, True, STEPS)[1]
    found = load(folder, model, own_name=lambda name: name[2:])
    assert found == {"step": STEPS, "extra": EXTRA}
    for net in model.values():
        assert_same(net.state_dict(), read_model(folder))


def read_by_torch(folder: str, into: dict[str, Tensor]) -> None:
    from torch.distributed import checkpoint

    reader = checkpoint.HuggingFaceStorageReader(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it runs without processes
        checkpoint.load(into, storage_reader=reader, no_dist=True)


def read_shards(folder: str, names: list[str]) -> dict[str, Tensor]:
    """What torch's reader puts into shards on a mesh of its own, whole."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = zbpp.mesh(stages=1, data_parallel=2)["dp"]
    state = {f"model/{name}": x for name, x in layers(False).state_dict().items()}
    shards = {x: distribute_tensor(state[x] * 0, mesh, [Shard(0)]) for x in names}
    read_by_torch(folder, shards)
    return {name: x.full_tensor() for name, x in shards.items()}


def pieces_in(file: Path) -> list[tuple[str, Any]]:
    """The shards in a file, by name and offset."""
    with safetensors.safe_open(file, framework="pt") as opened:
        about = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
    return [(name, str(of_shard)) for name, of_shard in about.items()]


@pytest.mark.dist
def test_torch_alone_reads_what_four_processes_have_sharded(
    pool: Pool, tmp_path: Path
) -> None:
    """Into a plain model, and into shards on another mesh."""
    place = Place("ZBV", 2, True, 2, "parameters")
    run(pool, place, False, str(tmp_path), 1)
    folder, model = newest(tmp_path), layers(False)
    assert folder is not None
    files = [*folder.glob("*.safetensors")]
    pieces = [piece for file in files for piece in pieces_in(file)]
    assert len(files) == place.n_ranks and len({*pieces}) == len(pieces)
    start = {name: x.clone() for name, x in model.state_dict().items()}
    names = model.state_dict().keys() - {f"{N_LAYERS - 1}.linear.weight"}  # tied
    into = {f"model/{name}": model.state_dict()[name] for name in names}
    read_by_torch(str(folder), into)
    assert_same(model.state_dict(), read_model(folder))
    linears = [name for name in start if ".linear." in name]
    assert not any(
        torch.equal(start[name], into_model)
        for name, into_model in model.state_dict().items()
        if name in linears
    )
    sharded = [f"model/{name}" for name in linears if name in names]
    for found in pool.run(read_shards, 2, str(folder), sharded):
        assert_same(found, {name: into[name] for name in sharded})
