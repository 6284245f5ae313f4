"""Whatever a script does, a post-validated pipeline shows the bits of a plain one.

Each history runs twice, side by side: in a pipeline whose steps are speculative, on any
number of stages, and in one of a single stage that waits for the norm of each step.
"""

from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from case_models import N_LAYERS
from histories import (
    CLIP,
    INF,
    ONE_CHUNK,
    SCHEDULERS,
    SPIKE,
    TWO_CHUNKS,
    Action,
    BadGradient,
    Case,
    Run,
)
from hypothesis import Phase, event, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from optimizers import OPTIMIZERS
from pool import Pool
from same import difference

from zbpp.runtime.testing import small_buckets

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* gains little here"),
    pytest.mark.filterwarnings("ignore:.*no optimizer steps them:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning"),
]


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


PLACES = st.one_of(
    st.tuples(one_of(*ONE_CHUNK), one_of(2, 3, 4, 1)),
    st.tuples(one_of(*TWO_CHUNKS), one_of(2, 3, 4, 1)),
)
"""Mode and number of stages."""

MODELS = (
    *("buffers", "lm", "lm tied", "tied thrice", "norms", "draws", "lm dropout"),
    *("buffers by data", "cached", "16 bits", "in place", "changed targets"),
    *("clamped weights", "replaced weights", "shrunk weights"),
)
RARELY = one_of(False, False, True)


@st.composite
def cases(draw: Any) -> Case:
    """The first value of each choice is the plainest."""
    mode, n_stages = draw(PLACES)
    return Case(
        mode=mode,
        n_stages=n_stages,
        model=draw(one_of(*MODELS)),
        n_microbatches=draw(st.integers(1, 3)),
        calls=draw(one_of(0, 0, 2)),
        optimizer=draw(one_of(*OPTIMIZERS)),
        scheduler=draw(one_of(*SCHEDULERS)),
        autocast=draw(RARELY),
        grows=draw(RARELY),
        snapshots=draw(RARELY),
        seed=draw(one_of(3, None)),
    )


BAD_GRADIENTS = st.builds(
    BadGradient,
    factor=one_of(1e5, 1e5, float("inf"), float("-inf"), float("nan")),
    microbatch=st.integers(0, 11),
    layer=st.none() | st.integers(0, N_LAYERS - 1),
)
LAYERS = st.integers(0, N_LAYERS - 1)


def after_steps(**strategies: st.SearchStrategy[Any]) -> Any:
    """A rule: an action that comes after one step or several."""

    def decorate(action: Any) -> Any:
        @wraps(action)
        def run(self: Any, kinds: Any, parts: bool, key: bool, **more: Any) -> None:
            for bad in kinds:
                self.both("step", bad, parts=parts, key=key)
            action(self, **more)

        kinds = st.lists(BAD_GRADIENTS | st.none(), min_size=1, max_size=2)
        return rule(kinds=kinds, parts=RARELY, key=RARELY, **strategies)(run)

    return decorate


class Histories(RuleBasedStateMachine):
    """Two runs of one history."""

    folder = Path()
    n_rollbacks = n_steps = n_histories = 0

    @initialize(case=cases())
    def begin(self, case: Case) -> None:
        folder = self.folder / str(Histories.n_histories)
        Histories.n_histories += 1
        self.case, self.n_compared = case, 0
        self.ours = Run(case, folder / "ours")
        self.theirs = Run(case.reference, folder / "theirs")
        event(case.mode)

    def both(self, action: str, *args: Any, **more: Any) -> None:
        """Act in both, and compare what they show."""
        ours = self.ours.do(action, *args, **more)
        theirs = self.theirs.do(action, *args, **more)
        found = difference(ours, theirs)
        assert found is None, f"{action} {args}: {found}\n{self.case}"

    @after_steps()
    def only_steps(self) -> None:
        """And no action."""

    @after_steps()
    def read_results(self) -> None:
        self.compare_results()

    def compare_results(self) -> None:
        self.both("read")
        for ours, theirs in zip(
            self.ours.results[self.n_compared :],
            self.theirs.results[self.n_compared :],
            strict=True,
        ):
            is_invalid = theirs.skipped or theirs.grad_norm > CLIP
            is_validated = self.ours.pipeline.schedule.is_post_validated
            assert ours.rollbacks == (is_invalid and is_validated)
            assert theirs.rollbacks == 0
            Histories.n_rollbacks += ours.rollbacks
        self.n_compared = len(self.ours.results)

    @after_steps(n_microbatches=st.integers(1, 5))
    def evaluate(self, n_microbatches: int) -> None:
        self.both("evaluate", n_microbatches)

    @after_steps()
    def predict(self) -> None:
        self.both("predict")

    @after_steps(view=one_of("state", "named", "modules", "optimizers"))
    def look(self, view: str) -> None:
        self.both("look", view)

    @after_steps()
    def synchronize(self) -> None:
        self.ours.do("synchronize")

    @precondition(lambda self: self.case.model != "shrunk weights")
    @after_steps(place=PLACES, by=one_of("file", "memory"))
    def move(self, place: tuple[str, int], by: str) -> None:
        """To another schedule on other stages."""
        self.compare_results()
        self.ours.do("move", *place, by)

    @precondition(lambda self: self.case.model != "shrunk weights")
    @after_steps(data=st.data())
    def switch(self, data: st.DataObject) -> None:
        modes = TWO_CHUNKS if self.ours.case.mode in TWO_CHUNKS else ONE_CHUNK
        self.ours.do("switch", data.draw(one_of(*modes)))

    @after_steps(layer=LAYERS, how=one_of("in place", "data", "other memory"))
    def write(self, layer: int, how: str) -> None:
        """A write that leaves no mark is not found in copies of tied weights."""
        is_tied = any(layer == i for tie in self.case.of.ties for i, _ in tie)
        self.both("write", layer, "in place" if is_tied else how)

    @after_steps(layer=LAYERS)
    def load_layer(self, layer: int) -> None:
        self.both("load_layer", layer)

    @after_steps(factor=one_of(0.5, 2.0))
    def set_rate(self, factor: float) -> None:
        self.both("set_rate", factor)

    @after_steps()
    def schedule_rates(self) -> None:
        self.both("schedule_rates")

    @after_steps(layer=LAYERS, number=st.integers(0, 2))
    def freeze(self, layer: int, number: int) -> None:
        self.both("freeze", layer, number)

    @after_steps(layer=LAYERS)
    def look_within(self, layer: int) -> None:
        self.ours.do("look_within", layer)
        self.theirs.do("step")

    @after_steps(
        kind=one_of(ValueError, KeyboardInterrupt),
        layer=LAYERS,
        where=one_of("F", "B"),
    )
    def interrupt(self, kind: Any, layer: int, where: str) -> None:
        """A pass raises, and a new pipeline continues from a right state."""
        self.compare_results()
        self.ours.do("interrupted", kind("no\nluck"), layer, where)
        (text,) = self.ours.refusals()
        n_steps = self.theirs.pipeline.n_steps
        failed = f"step {n_steps} failed ({kind.__name__}: no), and the pipeline has"
        assert text.startswith(failed)
        saved = f"last checkpoint, from {self.ours.folder})"
        assert (saved if self.ours.has_saved else "no checkpoint was saved") in text
        assert "\n" not in text
        self.ours.do("restart", self.theirs.pipeline.state_dict())

    def teardown(self) -> None:
        if hasattr(self, "theirs"):
            self.compare_results()
            self.both("look")
            self.both("close")
            Histories.n_steps += len(self.ours.results)


@pytest.mark.timeout(900)
def test_random_histories_match_the_plain_model(tmp_path: Path) -> None:
    """Without shrinking, which would train for many minutes."""
    Histories.folder = tmp_path
    phases = set(Phase) - {Phase.shrink, Phase.explain}
    with small_buckets():
        run_state_machine_as_test(
            Histories, settings=settings(stateful_step_count=5, phases=phases)
        )
    assert 40 < Histories.n_rollbacks < Histories.n_steps - 40


# Fixed histories: of every optimizer, and on every rank.

VALID, CLIPPED, SKIPPED = ("step",), ("step", SPIKE), ("step", INF)
WITH_ALL: tuple[Action, ...] = (
    VALID, CLIPPED, ("freeze", 3), SKIPPED, ("set_rate", 0.5), CLIPPED,
    ("synchronize",), ("freeze", 3), VALID, SKIPPED,
    ("schedule_rates",), CLIPPED, VALID, ("look", "optimizers"), CLIPPED,
)  # fmt: skip


def play(case: Case, actions: tuple[Action, ...], folder: str = "") -> list[Any]:
    """What a history shows, its results, and the state that it leaves."""
    with small_buckets():
        run = Run(case, folder)
        shown = [run.do(*action) for action in actions]
        shown += [run.read(), run.look("state")]
        run.close()
    return [*shown, [result.rollbacks for result in run.results]]


def is_variant(name: str) -> bool:
    """True for another implementation of an optimizer that is not AdamW."""
    return name.endswith((" foreach", " fused")) and not name.startswith("AdamW ")


ROWS = [
    *(
        pytest.param(
            Case(optimizer=name, scheduler="steps", n_microbatches=1),
            id=name,
            marks=pytest.mark.slow if is_variant(name) else (),
        )
        for name in OPTIMIZERS
    ),
    *(pytest.param(Case(model=name), id=name) for name in MODELS),
    pytest.param(Case(model="shrunk weights", optimizer="hooked"), id="both"),
]


@pytest.mark.parametrize("case", ROWS)
def test_every_optimizer_and_model_is_rolled_back(case: Case) -> None:
    *ours, rollbacks = play(case, WITH_ALL)
    *theirs, _ = play(case.reference, WITH_ALL)
    assert difference(ours, theirs) is None
    assert rollbacks == [0, 1, 1, 1, 0, 1, 1, 0, 1]


IN_PROCESSES: dict[str, tuple[int, Case, tuple[Action, ...]]] = {
    "all": (2, Case(mode="ZBV", scheduler="one cycle", grows=True), WITH_ALL),
    "switch and move": (
        2,
        Case(mode="ZBH2", model="lm dropout", optimizer="several", seed=None),
        (
            CLIPPED, VALID, ("switch", "1F1B"), SKIPPED, ("evaluate", 3), CLIPPED,
            ("move", "ZBH1", None, "file"), VALID, CLIPPED, ("predict",), SKIPPED,
            ("look", "modules"), CLIPPED, ("write", 3, "data"), CLIPPED,
        ),
    ),
    "tied": (
        2,
        Case(model="tied thrice", calls=2, n_microbatches=2),
        (
            VALID, ("peek",), CLIPPED, ("write", 3, "in place"), CLIPPED, SKIPPED,
            ("move", "ZBH2", None, "memory"), CLIPPED, VALID, ("load_layer", 2),
            SKIPPED,
        ),
    ),
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(
    "name", ["all", "tied", pytest.param("switch and move", marks=pytest.mark.slow)]
)
def test_ranks_return_the_results_of_one_process(
    name: str, pool: Pool, tmp_path: Path
) -> None:
    n, case, actions = IN_PROCESSES[name]
    case = replace(case, n_stages=None)
    ranks = pool.run(play, n, case, actions, str(tmp_path))
    *expected, _ = play(
        replace(case, n_stages=1).reference, actions, tmp_path / "whole"
    )
    joined: dict[str, Any] = {}
    for *shown, rollbacks in ranks:
        assert rollbacks == ranks[0][-1] and sum(rollbacks) > 2
        for number, (ours, theirs) in enumerate(zip(shown, expected, strict=True)):
            what = actions[number] if number < len(actions) else "the end"
            if ours is None:
                continue
            here = {k: theirs[k] for k in ours} if isinstance(ours, dict) else theirs
            assert difference(ours, here) is None, what
        joined |= shown[-1]
    assert joined.keys() == expected[-1].keys()
