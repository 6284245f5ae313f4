"""A run goes on under another schedule on other stages, with the bits of one run."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from saved_runs import Plain, run, run_in_processes, run_plainly
from small_model import N_LAYERS, assert_same
from torch.distributed.checkpoint import HuggingFaceStorageReader

from zbpp.checkpoint import load, newest, read_model
from zbpp.core import LayerCosts
from zbpp.pipeline import Pipeline

SAVED = [("ZBV", 4), ("1F1B", 2), ("VPP", 2)]
LOADED = [("ZBH1", 4), ("1F1B", 1), ("ZBV", 2), ("plain", 1)]
QUICK = {("ZBV", "ZBH1"), ("VPP", "plain"), ("1F1B", "ZBV")}


@pytest.fixture(scope="module")
def undisturbed():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    outcome = run("ZBH1", 2)
    torch.set_num_threads(before)
    assert outcome[2] >= 2, "no step was rolled back, so the case is too easy"
    assert len({norm > 0.9 for _, norm in outcome[0]}) == 2, "all or none are clipped"
    return outcome


@pytest.fixture(scope="module")
def saved_by(undisturbed, tmp_path_factory):
    """Folder of the checkpoint of a run; each run is done once."""

    @functools.cache
    def folder(mode: str, n_stages: int) -> Path:
        made = tmp_path_factory.mktemp(mode)
        assert run(mode, n_stages, save=str(made))[0] == undisturbed[0][:3]
        return made

    return folder


def check(outcome, undisturbed) -> None:
    assert outcome[0] == undisturbed[0][3:]
    assert_same(outcome[1], undisturbed[1])


def cases():
    for saved in SAVED:
        for loaded in LOADED:
            quick = (saved[0], loaded[0]) in QUICK
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(saved, loaded, marks=marks)


@pytest.mark.parametrize(("saved", "loaded"), list(cases()))
def test_in_one_process(saved, loaded, undisturbed, saved_by) -> None:
    folder = saved_by(*saved)
    if loaded[0] == "plain":
        check(run_plainly(folder), undisturbed)
    else:
        check(run(*loaded, loaded=str(folder)), undisturbed)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("ZBV", 2), ("ZBH1", 3)),
        pytest.param(("ZBV", 4), ("1F1B", 2), marks=pytest.mark.slow),
        pytest.param(("VPP", 2), ("ZBH1", 4), marks=pytest.mark.slow),
    ],
)
def test_in_processes(saved, loaded, undisturbed, tmp_path, pool: Pool) -> None:
    folder = str(tmp_path)
    pool.run(run_in_processes, saved[1], saved[0], folder, None)
    files = sorted(one.name for one in newest(tmp_path).iterdir())
    assert files == ["manifest.json"] + [
        f"stage-{stage}.safetensors" for stage in range(saved[1])
    ]
    ranks = pool.run(run_in_processes, loaded[1], loaded[0], None, folder)
    assert all(numbers == undisturbed[0][3:] for numbers, _, _ in ranks)
    assert_same({n: p for one in ranks for n, p in one[1].items()}, undisturbed[1])
    check(run_plainly(tmp_path), undisturbed)


FORGET: dict[str, Callable[[Pipeline, list[Any]], object]] = {
    "moments": lambda pipeline, _: pipeline.optimizers[0].state.clear(),
    "betas": lambda pipeline, _: (
        pipeline.optimizers[0].param_groups[0].update(betas=(0.9, 0.999))
    ),
    "scheduler": lambda _, schedulers: setattr(schedulers[0], "last_epoch", 0),
    "buffers": lambda pipeline, _: dict(pipeline.named_buffers())[
        "layers.2.mean"
    ].zero_(),
}


@pytest.mark.parametrize("what", FORGET)
def test_what_is_not_restored_is_noticed(what, undisturbed, saved_by) -> None:
    """The negative control of all others: each part of the state makes a difference."""
    folder = str(saved_by("1F1B", 2))
    with pytest.raises(AssertionError):
        check(run("1F1B", 2, loaded=folder, after_load=FORGET[what]), undisturbed)


def test_auto_may_choose_another_split_than_the_run_that_saved(
    undisturbed, tmp_path
) -> None:
    """Layers move to other stages at a checkpoint."""
    run("1F1B", 2, save=str(tmp_path), split=[2, 7])
    times = (6.0, *(1.0,) * (N_LAYERS - 1))
    costs = LayerCosts(N_LAYERS, f=times, b=times, w=times)
    outcome = run("auto", 2, loaded=str(tmp_path), layer_costs=costs)
    check(outcome, undisturbed)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_storage_reader_of_torch_takes_the_folder(saved_by) -> None:
    """Also where the tensors of four stages lie in four files."""
    folder = newest(saved_by("ZBV", 4))
    expected = {f"model/{name}": x for name, x in read_model(folder).items()}
    found = {name: torch.empty_like(x) for name, x in expected.items()}
    reader = HuggingFaceStorageReader(str(folder))
    torch.distributed.checkpoint.load(found, storage_reader=reader, no_dist=True)
    assert_same(found, expected)


def test_weights_for_inference(saved_by) -> None:
    folder = saved_by("ZBV", 4)
    model = Plain()
    told = load(folder, model)
    assert told == {"step": 3, "extra": {}, "run": {}}
    assert_same(read_model(folder), model.state_dict())
