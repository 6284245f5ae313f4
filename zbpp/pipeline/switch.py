"""Another schedule for a pipeline that runs: the same chunks, jobs in another order."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zbpp.core import Program, RequestError, Schedule, schedule_text
from zbpp.pipeline.parallel import with_collectives
from zbpp.planning import Plan
from zbpp.planning.answer import recomputed_layers
from zbpp.planning.pipelines import choose_validation
from zbpp.runtime.driver.agreement import check_agreement
from zbpp.runtime.driver.build import StageOptions
from zbpp.runtime.executor import Executor
from zbpp.runtime.parallel.mesh import Place
from zbpp.runtime.ties.plan import TiePlan
from zbpp.schedules import lower

__all__ = ["Switching"]


class Switching:
    """The part of a pipeline that changes its schedule between two steps."""

    chosen: Plan
    schedule: Schedule
    split: tuple[range, ...]
    place: Place
    _options: StageOptions
    _ties: TiePlan
    _executors: Mapping[int, Executor]
    _programs: Sequence[Program]
    n_switches = 0
    """Times that the schedule was changed."""

    if TYPE_CHECKING:

        def synchronize(self) -> None:
            """Settle the last step; `zbpp.Pipeline` does."""

    def switch(self, schedule: Schedule) -> None:
        """Run the next steps by another schedule (every rank must call, with the same).

        Layers stay where they are, and steps are validated as before. Gradients are
        added in micro-batch order, so losses and parameters are those of a run without
        the switch, to the bit; with ``exact_sums=False`` they are rounded differently.

        Args:
            schedule: with the placement and the micro-batches of the present one.

        Raises:
            RequestError: it has others, or another split; or the ranks were given
                different ones.
            PeerError: another stage died or does not switch.
        """
        self._check_same_jobs(schedule)
        schedule = choose_validation(schedule, self.schedule.is_post_validated)
        lower(schedule, ties=self._ties.chunks)  # it may be that it cannot be run
        again = recomputed_layers(schedule, [len(layers) for layers in self.split])
        self.synchronize()
        asked = ("switch", schedule_text(schedule))
        check_agreement(self._executors, asked, self._ties)
        self.schedule, self._programs = with_collectives(
            schedule,
            self._executors,
            self.place,
            self._options.shard,
            ties=self._ties.chunks,
            costs=self.chosen.known_costs,
        )
        for executor in self._executors.values():
            executor.stage.recompute(again)

    def _check_same_jobs(self, schedule: Schedule) -> None:
        now = self.schedule
        split = tuple(len(layers) for layers in self.split)
        for what, before, after in (
            ("placement", now.placement.stage_of, schedule.placement.stage_of),
            ("micro-batches", now.n_microbatches, schedule.n_microbatches),
            ("split", split, schedule.split or split),
        ):
            if after != before:
                raise RequestError(
                    f"the schedule to switch to has the {what} {after}; the pipeline "
                    f"runs {before}: build a new Pipeline for another, from a "
                    "checkpoint"
                )
