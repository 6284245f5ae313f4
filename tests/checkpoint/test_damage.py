"""Damaged checkpoints are refused by name, and the one before is taken."""

import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pool import Pool
from saved_runs import make
from small_model import batch

from zbpp.checkpoint import CheckpointError, newest, read_model
from zbpp.checkpoint.manifest import MANIFEST
from zbpp.pipeline import Pipeline

Damage = Callable[[Path, random.Random], str]
"""Damages a checkpoint; returns what the refusal must name."""


def save_twice(folder: str) -> None:
    pipeline, _ = make("1F1B", None)
    for step in range(2):
        pipeline.step(*batch(step))
        pipeline.save(folder, wait=True)
    pipeline.close()


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pool.run(save_twice, 2, str(folder))
    return folder


def flip(path: Path, seed: random.Random) -> str:
    one = seed.choice(sorted(path.iterdir()))
    data = bytearray(one.read_bytes())
    data[seed.randrange(len(data))] ^= 1 << seed.randrange(8)
    one.write_bytes(data)
    return one.name


def truncate(path: Path, seed: random.Random) -> str:
    one = seed.choice(sorted(path.iterdir()))
    one.write_bytes(one.read_bytes()[: seed.randrange(one.stat().st_size)])
    return one.name


def remove(path: Path, seed: random.Random) -> str:
    one = seed.choice(sorted(path.iterdir()))
    one.unlink()
    return one.name


def append(path: Path, seed: random.Random) -> str:
    one = seed.choice(sorted(path.glob("*.safetensors")))
    one.write_bytes(one.read_bytes() + seed.randbytes(8))
    return one.name


def swap(path: Path, seed: random.Random) -> str:
    """Files of two stages, or of two steps."""
    mine = path / "stage-0.safetensors"
    other = seed.choice(
        [path / "stage-1.safetensors", path.parent / "step-00000001" / mine.name]
    )
    shutil.copy(other, mine)
    return mine.name


def edit(path: Path, seed: random.Random) -> str:
    """Another step, shape, place or value; still a manifest."""
    one = path / MANIFEST
    body = json.loads(one.read_text())
    part = seed.choice(["step", "tensors", "values", "files", "run", "version"])
    if part in ("step", "version"):
        body[part] += seed.choice([1, 7])
    elif part == "tensors":
        name = seed.choice(sorted(body[part]))
        body[part][name]["file"] = "../../etc/passwd"
    elif part == "values":
        del body[part]["optimizer"][seed.choice(sorted(body[part]["optimizer"]))]
    elif part == "files":
        del body[part]["stage-1.safetensors"]
    else:
        body[part]["n_stages"] = 5
    one.write_text(json.dumps(body))
    return one.name


class Bomb:
    def __reduce__(self):
        return (Path("bomb-has-gone-off").touch, ())


def bomb(path: Path, seed: random.Random) -> str:
    """A file that would run code if it were unpickled."""
    one = seed.choice(sorted(path.iterdir()))
    one.write_bytes(pickle.dumps(Bomb()))
    return one.name


WAYS: list[Damage] = [flip] * 20 + [truncate] * 10 + [edit] * 10
WAYS += [remove] * 3 + [swap] * 3 + [append] * 2 + [bomb] * 2
assert len(WAYS) == 50


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    made, _ = make("ZBH1", 2)
    yield made
    made.close()


def test_none_of_fifty_is_loaded(saved, tmp_path, pipeline, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sound = read_model(saved / "step-00000001")
    for number, way in enumerate(WAYS):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        bad = folder / "step-00000002"
        name = way(bad, random.Random(number))
        with pytest.raises(CheckpointError) as refused:
            pipeline.load(bad)
        assert name in str(refused.value), (number, way.__name__)
        assert newest(folder) == folder / "step-00000001"
        assert pipeline.n_steps == 0 and not pipeline.optimizers[0].state
    pipeline.load(folder)
    assert pipeline.n_steps == 1
    state = pipeline.state_dict()["model"]
    assert all(torch.equal(state[n], sound[n]) for n in sound)
    assert not (tmp_path / "bomb-has-gone-off").exists()


def test_a_damaged_one_is_logged_when_the_one_before_is_taken(
    saved, tmp_path, pipeline, caplog
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    name = flip(tmp_path / "run" / "step-00000002", random.Random(3))
    pipeline.load(tmp_path / "run")
    (record,) = caplog.records
    assert "passed over" in record.message and name in record.message


def test_nothing_there_is_said(tmp_path, pipeline) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        pipeline.load(tmp_path)
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        pipeline.load(tmp_path)
    assert newest(tmp_path) is None
