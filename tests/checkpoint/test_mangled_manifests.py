"""Manifests changed at random, their hashes made right again: loaded or refused."""

import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mangle import mangled_json
from torch import nn

import zbpp
from zbpp.checkpoint import CheckpointError, load
from zbpp.checkpoint.manifest import MANIFEST
from zbpp.core import RequestError

_WATCHED: list[list[str]] = []


def _note(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook stays for good; it notes only while somebody watches."""
    if not _WATCHED:
        return
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        _WATCHED[-1].append(os.fsdecode(args[0]))
    elif event == "exec":  # the code of modules that are imported late has their path
        _WATCHED[-1].append(args[0].co_filename)
    elif event in ("os.system", "subprocess.Popen", "pickle.find_class"):
        _WATCHED[-1].append(event)


sys.addaudithook(_note)


@contextmanager
def watched() -> Iterator[list[str]]:
    """List the paths that are opened, and what is executed."""
    _WATCHED.append([])
    try:
        yield _WATCHED[-1]
    finally:
        _WATCHED.clear()


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]


def pipeline_of(modules: list[nn.Module]) -> zbpp.Pipeline:
    pipeline = zbpp.Pipeline(
        modules,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01),
        schedule="ZBH1",
        n_stages=2,
        n_microbatches=2,
    )
    pipeline.attach(
        *(torch.optim.lr_scheduler.StepLR(one, 3) for one in pipeline.optimizers)
    )
    return pipeline


@pytest.fixture(scope="module")
def loader(tmp_path_factory) -> Iterator[tuple[zbpp.Pipeline, Path, dict[str, Any]]]:
    """A pipeline, a checkpoint of it, and what its manifest holds."""
    with pipeline_of(layers()) as pipeline:
        pipeline.step(torch.randn(4, 4), torch.randn(4, 4))
        folder = tmp_path_factory.mktemp("mangled")
        pipeline.save(folder, extra={"epoch": 1}, wait=True)
        (path,) = folder.iterdir()
        pipeline.load(path)
        repr(torch.ones(1))  # for which torch imports, and so executes, the rest
        yield pipeline, path, json.loads((path / MANIFEST).read_text())


def write(path: Path, body: dict[str, Any]) -> None:
    """Write a manifest with the hash of itself."""
    body = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps(body))


def try_to_load(pipeline: zbpp.Pipeline, path: Path) -> None:
    """Load it with and without a pipeline; nothing outside the folder is opened."""
    with watched() as events:
        with suppress(RequestError):
            pipeline.load(path)
        with suppress(RequestError):
            load(path, nn.ModuleList(layers()))
    outside = [
        event
        for event in events
        if not Path(event).is_relative_to(path) and not event.endswith((".py", ".pyc"))
    ]
    assert not outside
    assert str(path / MANIFEST) in events  # the control: openings are seen


@given(seed=st.integers(0, 2**32))
def test_a_mangled_manifest_is_loaded_or_refused(loader, seed):
    pipeline, path, body = loader
    write(path, mangled_json(body, random.Random(seed)))
    try_to_load(pipeline, path)


NESTED = "[" * 100_000 + "]" * 100_000


def test_a_manifest_nested_too_deep_leaves_the_checkpoint_before(loader, tmp_path):
    pipeline, path, body = loader
    write(path, body)
    shutil.copytree(path, tmp_path / "step-00000001")
    shutil.copytree(path, tmp_path / "step-00000002")
    (tmp_path / "step-00000002" / MANIFEST).write_text(NESTED)
    assert pipeline.load(tmp_path) == {"epoch": 1}
    with pytest.raises(CheckpointError, match="is damaged"):
        pipeline.load(tmp_path / "step-00000002")


@pytest.mark.parametrize("name", [MANIFEST, "stage-0.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    loader, tmp_path, name
):
    pipeline, path, body = loader
    write(path, body)
    copy = tmp_path / "step-00000001"
    shutil.copytree(path, copy)
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(CheckpointError, match=f"{name} is no"):
        pipeline.load(copy)


def test_a_sparse_manifest_is_not_read(loader, tmp_path):
    pipeline, _, _ = loader
    copy = tmp_path / "step-00000001"
    copy.mkdir()
    (copy / MANIFEST).touch()
    os.truncate(copy / MANIFEST, 20 * 2**30)
    with pytest.raises(CheckpointError, match="no file of at most"):
        pipeline.load(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(file="stage-9.safetensors"), "in no file"),
        (lambda t: t.update(shape=[10**9, 10**9]), "of another kind"),
        (lambda t: t.update(dtype="F16"), "of another kind"),
    ],
)
def test_a_tensor_that_its_file_does_not_hold_is_refused(loader, change, words):
    pipeline, path, body = loader
    body = json.loads(json.dumps(body))
    change(body["tensors"]["model/layers.0.0.weight"])
    write(path, body)
    with pytest.raises(RequestError, match=words):
        pipeline.load(path)
