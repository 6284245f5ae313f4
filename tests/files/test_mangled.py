"""Any file, changed at random, is read and used, or refused in a line that names it."""

import copy
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import zbpp
from zbpp.core import (
    Costs,
    LayerCosts,
    RequestError,
    draw,
    read_costs,
    read_layers,
    schedule_text,
    write_costs,
)
from zbpp.planning import PlanRequest, make_plan
from zbpp.simulator import bubble_rate, simulate

SIZES = {"n_stages": 2, "n_microbatches": 3}
COSTS = Costs(
    f=1.5, b=1.5, w=0.7, speed=(1, 1.5), comm=0.1, m_w=0.4, memory_limit=(9, 8),
    peak_f=1.5, splits=(True, False), m_fixed=0.5, reduction=0.1,
    loss=1,
)  # fmt: skip
LAYERS = LayerCosts(
    n_layers=5, f=(1, 2, 3, 2, 1), w=0.5, pass_f=0.1, m_b=(1, 2, 1, 2, 1), m_w=0.4,
    message=5, bandwidth=10, delay=0.1, memory_limit=60, m_r=0.1, parameters=2,
)  # fmt: skip
NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 10**12, 10**30, 10**400),
    *(0.5, -0.0, 1e308, 1e101, 1e-320, float("inf"), float("nan")),
    *("", "x", "0F0", "inf", "1e400", "40GiB", "..", "../x", "/etc/hostname", "<!--"),
    *([], {}, [[]], [None], [1.0, "a"], {"a": 1}, {"tensor": "x"}, {"tuple": 1}),
    *({"float": "x"}, {"dict": [[[], 1]]}, {"dict": 3}, {"counter": [1]}),
)
DEEP = 5000  # more than Python's stack


def mangled_text(text: str, rng: random.Random) -> str:
    """Flip, insert, repeat or cut some characters."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        piece = text[at : at + rng.randint(1, 12)]
        odd = chr(rng.choice((0, 9, 34, 45, 57, 91, 0x2028)))
        text = rng.choice(
            [
                text[:at],
                text[:at] + odd + text[at:],
                text[:at] + text[at + len(piece) :],
                text[:at] + piece * rng.randint(2, 50) + text[at:],
                text[:at] + str(rng.choice(NASTY)) + text[at + 1 :],
            ]
        )
    return text


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys, the deeper ones too."""
    keys: Any = data if isinstance(data, dict) else ()
    if isinstance(data, list):
        keys = range(len(data))
    for key in keys:
        yield data, key
        yield from places(data[key])


def mangled_json(data: Any, rng: random.Random) -> Any:
    """Replace, remove, repeat or swap some values."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        found = [*places(data)]
        if not found:
            return data
        inside, key = rng.choice(found)
        way = rng.randrange(6)
        if way == 0 and isinstance(inside, dict):
            inside["unknown"] = inside.pop(key)
        elif way <= 1:
            del inside[key]
        elif way == 2 and isinstance(inside, list):
            inside.insert(key, copy.deepcopy(inside[key]))
        else:
            other, place = rng.choice(found)
            value = other[place] if way == 3 else rng.choice(NASTY)
            inside[key] = copy.deepcopy(value)
    return data


def mangled(text: str, seed: int) -> str:
    rng = random.Random(seed)
    if rng.random() < 0.02:
        return "[" * DEEP + "]" * DEEP
    if rng.random() < 0.2:
        return mangled_text(text, rng)
    return json.dumps(mangled_json(json.loads(text), rng))


class Format(NamedTuple):
    """How a file of a kind is written, read, and used."""

    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    use: Callable[[Any], object]


def plan_with(costs: Costs) -> None:
    for mode in ("ZB", "ZBV", "1F1B"):
        with suppress(RequestError):
            bubble_rate(simulate(zbpp.plan(mode, costs=costs, **SIZES), costs))


def plan_of(costs: Any) -> Any:
    asked = PlanRequest(schedule="ZBV", costs=costs, effort="fast", **SIZES)
    return make_plan(asked)


FORMATS = {
    "schedule": Format(
        lambda path: path.write_text(schedule_text(zbpp.plan("ZBV", **SIZES))),
        lambda path: zbpp.read_plan(path).schedule,
        lambda schedule: draw(simulate(schedule)),
    ),
    "costs": Format(lambda path: write_costs(COSTS, path), read_costs, plan_with),
    "layers": Format(lambda path: write_costs(LAYERS, path), read_layers, plan_of),
    "plan": Format(
        lambda path: plan_of(COSTS).save(path),
        zbpp.read_plan,
        lambda plan: (plan.line, draw(simulate(plan.schedule, plan.costs))),
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    paths = {name: folder / f"{name}.json" for name in FORMATS}
    for name, path in paths.items():
        FORMATS[name].write(path)
    return paths


@pytest.mark.parametrize("name", FORMATS)
@given(seed=st.integers(0, 2**32))
def test_a_mangled_file_is_read_or_refused(
    name: str, written: dict[str, Path], seed: int
) -> None:
    path = written[name].with_name(f"mangled_{name}.json")
    kind, text = FORMATS[name], written[name].read_text(encoding="utf-8")
    kind.use(kind.read(written[name]))  # the control: as it is, it can be used
    path.write_text(mangled(text, seed), encoding="utf-8", errors="surrogatepass")
    try:
        found = kind.read(path)
    except RequestError as error:
        assert path.name in str(error).splitlines()[0]  # a picture may follow
        return
    with suppress(RequestError):
        kind.use(found)


EXTREMES = st.one_of(
    st.floats(0, 1e160), st.sampled_from([0.0, 5e-324, 1e-300, 1e-100, 1e100, 1e150])
)


@example(f=1e100, w=5e-324, m_b=5e-324, m_w=1e-300, limit=1e150)
@given(f=EXTREMES, w=EXTREMES, m_b=EXTREMES, m_w=EXTREMES, limit=EXTREMES)
def test_extreme_costs_are_planned_or_refused(
    f: float, w: float, m_b: float, m_w: float, limit: float
) -> None:
    with suppress(RequestError):
        plan_with(Costs(f=f, w=w, m_b=m_b, m_w=m_w, memory_limit=limit))


def test_huge_numbers_in_files_are_refused_at_once(
    written: dict[str, Path], tmp_path: Path
) -> None:
    path, n = tmp_path / "x", 10**30
    data = json.loads(written["schedule"].read_text(encoding="utf-8"))
    path.write_text(json.dumps(data | {"n_microbatches": n, "jobs": [["0F0"], []]}))
    with pytest.raises(RequestError, match="0B0 is missing"):
        zbpp.read_plan(path)


@pytest.mark.slow
def test_a_file_of_20_gib_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 20 * 2**30)
    for kind in FORMATS.values():
        with pytest.raises(RequestError, match=f"{path}: .*longer than"):
            kind.read(path)


# ---- Checkpoints: nothing outside is opened, nothing in them is executed.

_watching: list[list[str]] = []


def _note(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook stays; it notes only while a test watches."""
    if not _watching:
        return
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        _watching[-1].append(os.fsdecode(args[0]))
    elif event == "exec":  # the code of modules that are imported late has their path
        _watching[-1].append(args[0].co_filename)
    elif event in ("os.system", "subprocess.Popen", "pickle.find_class"):
        _watching[-1].append(event)


sys.addaudithook(_note)


@contextmanager
def watched() -> Iterator[list[str]]:
    """The paths that are opened, and what is executed."""
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.clear()


Loader = tuple[Any, Path, dict[str, Any]]


@pytest.fixture(scope="module")
def loader(tmp_path_factory: Any) -> Iterator[Loader]:
    """A pipeline, the index of a checkpoint of it, and its content."""
    import torch
    from faulty_training import batch, make

    with make("ZBH1", 2) as pipeline:
        rates = [torch.optim.lr_scheduler.StepLR(x, 3) for x in pipeline.optimizers]
        pipeline.attach(*rates)
        pipeline.step(*batch(0))
        folder = tmp_path_factory.mktemp("checkpoint")
        pipeline.save(folder, extra={"epoch": 1}, wait=True)
        (index,) = folder.glob("*/*.json")
        pipeline.load(folder)
        repr(torch.ones(1))  # for which torch imports, and so executes, the rest
        yield pipeline, index, json.loads(index.read_text())


def signed(body: dict[str, Any]) -> str:
    """The content with the hash of itself, so that more than the hash is checked."""
    body = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps(body | {"sha256": hashlib.sha256(text.encode()).hexdigest()})


@pytest.mark.needs("torch")
@given(seed=st.integers(0, 2**32))
def test_a_mangled_checkpoint_opens_and_executes_nothing_else(
    loader: Loader, seed: int
) -> None:
    """Damage is refused by the hash; a forged hash leads to no other file."""
    from zbpp.checkpoint import load

    pipeline, index, body = loader
    bad = mangled_json(body, random.Random(seed))
    index.write_text(json.dumps(bad))
    if bad != body:
        with pytest.raises(RequestError, match=index.name):
            pipeline.load(index.parent)
    index.write_text(signed(bad))
    model = dict(pipeline.named_layers())["layers.0"]
    with watched() as events, suppress(Exception):
        load(index.parent, model)
    for event in events:
        path = Path(event)
        assert path.is_relative_to(index.parent) or path.suffix in (".py", ".pyc")
    assert str(index) in events  # the control: openings are seen


@pytest.mark.needs("torch")
def test_an_index_nested_too_deep_leaves_the_checkpoint_before(
    loader: Loader, tmp_path: Path
) -> None:
    pipeline, index, body = loader
    index.write_text(signed(body))
    for step in (1, 2):
        shutil.copytree(index.parent, tmp_path / f"step-0000000{step}")
    last = tmp_path / "step-00000002"
    (last / index.name).write_text("[" * 100_000 + "]" * 100_000)
    assert pipeline.load(tmp_path) == {"epoch": 1}
    with pytest.raises(RequestError, match="is damaged"):
        pipeline.load(last)
