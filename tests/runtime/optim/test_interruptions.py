"""Whatever interrupts a run, what it has saved is the state after a whole step.

Runs save between steps, also when SIGTERM asks for it; a fault strikes at any part of
the protocol. Every file must hold what the same run holds behind a barrier after that
step.
"""

import pickle
import random
import subprocess
from pathlib import Path

import pytest
from commands import torchrun
from histories import SPIKE, Event, History, Injector, batch, draw, make
from outcomes import State, look, same
from saving_run import HISTORY

N_STEPS = 8
INF = Event(5, "norm.weight", 1, float("inf"))
POINTS = ("V", "commit", "undo", "redo", "replay", "0F0", "1F1", "0B0", "O",
          "reduce the gradient norm over all stages")  # fmt: skip


def a_case(kind: str, point: str, in_save: bool) -> tuple[History, str]:
    """A random history, and a fault that strikes in it for sure.

    Odd steps begin with the step before not validated yet; after even numbers of steps
    a save has validated it. ``in_save``: strike in that validation, not in V.
    """
    rng = random.Random(repr((kind, point, in_save)))
    events = [rng.choice([None, SPIKE, INF]) for _ in range(N_STEPS)]
    step = rng.choice([3, 5])
    events[step] = rng.choice([SPIKE, INF])
    rank = int(point[0]) if point[0].isdigit() else rng.randrange(2)
    decided = step if in_save else step - 1
    if point == "commit":
        events[decided] = None
    elif point in ("redo", "replay"):
        events[decided] = rng.choice([SPIKE, INF])
    elif point == "undo":  # the stage that sees the Inf itself does not speculate
        events[decided], rank = INF, 0
    history = draw(
        rng.randrange(1000),
        n_stages=2,
        mode=rng.choice(["ZBH1", "ZBH2"]),
        n_microbatches=3,
        optimizer=rng.choice(["adamw", "fused", "sgd", "counting"]),
        events=tuple(events),
        looks=("",) * N_STEPS,
        scheduler=None,
    )
    return history, f"{kind}:{rank}:{step}:{point}"


KINDS = ("kill", "raise", "term")
CASES = [  # each point once, and each kind with each part of a save
    *((KINDS[i % 3], point, False) for i, point in enumerate(POINTS)),
    *zip(KINDS, ("commit", "undo", "redo"), (True, True, True), strict=True),
]


def expected_states(history: History) -> list[list[State]]:
    """By rank, then by the number of steps taken."""
    pipeline = make(history, 2, post_validation=False)
    injector = Injector(pipeline)
    states = [look(pipeline, [])]
    for step, event in enumerate(history.events):
        injector.begin(event)
        pipeline.step(*batch(history, step))
        states.append(look(pipeline, []))
    owned = [
        {f"layers.{i}" for c in executor.stage.chunks.values()
         for i in range(c.first, c.first + len(c.layers))}
        for executor in pipeline.stages.executors.values()
    ]  # fmt: skip
    return [
        [
            {
                key: value
                for key, value in state.items()
                if key == "loss scale"
                or key.startswith(f"stage {rank},")
                or ".".join(key.split(".")[:2]) in layers
            }
            for state in states
        ]
        for rank, layers in enumerate(owned)
    ]


def is_same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        same(value, right[key]) for key, value in left.items()
    )


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("kind", "point", "in_save"), CASES)
def test_what_is_saved_is_whole(
    kind: str, point: str, in_save: bool, tmp_path: Path
) -> None:
    history, fault = a_case(kind, point, in_save)
    (tmp_path / HISTORY).write_bytes(pickle.dumps(history))
    command, environment = torchrun("saving_run.py", str(tmp_path), fault)
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    ended = done.stderr
    step = int(fault.split(":")[2])
    if kind != "term":
        cause = "exitcode  : -9" if kind == "kill" else "a fault that the test asks for"
        assert cause in ended, f"{fault}: {ended}"
    names = {file.stem for file in tmp_path.glob("*.state")}
    assert {f"rank{rank}-after{step - 1}" for rank in range(2)} <= names
    if kind == "term":
        assert f"rank{fault.split(':')[1]}-after{step + 1}" in names
    expected = expected_states(history)
    for name in names:
        found = pickle.loads((tmp_path / f"{name}.state").read_bytes())
        rank, steps = int(name[4]), int(name[-1])
        assert is_same(found, expected[rank][steps]), f"{name} ({fault}: {ended})"
