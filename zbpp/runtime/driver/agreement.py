"""Compare the requests of all processes of a pipeline before they begin."""

import hashlib
from collections.abc import Mapping

from zbpp.core import RequestError
from zbpp.runtime.driver.tied_start import check_tied, describe_tied
from zbpp.runtime.executor import Executor
from zbpp.runtime.optim.norms import parameter_names
from zbpp.runtime.ties.plan import NO_TIES, TiePlan

__all__ = ["check_agreement"]


def check_agreement(
    executors: Mapping[int, Executor], request: object, ties: TiePlan = NO_TIES
) -> None:
    """Compare what the ranks were asked for, and exchange the parameters' names.

    Args:
        executors: of this process, by stage.
        request: its ``repr`` must be the same in all processes.
        ties: whose parameters must be stepped alike.

    Raises:
        RequestError: the ranks were asked for different things, or are about to step a
            tied parameter differently.
    """
    names = {
        layer: (stage, names)
        for stage, executor in executors.items()
        for layer, names in parameter_names(executor.stage).items()
    }
    transport = next(iter(executors.values())).transport
    digest = hashlib.sha256(repr((request, ties.ties)).encode()).hexdigest()
    answers = transport.gather((digest, names, describe_tied(executors)))
    other = [rank for rank, (its, *_) in enumerate(answers) if its != answers[0][0]]
    if other:
        raise RequestError(
            f"rank(s) {other} and rank 0 were started with different schedules, "
            "splits or settings; start all ranks with the same arguments"
        )
    check_tied(ties, [tied for *_, tied in answers])
    for executor in executors.values():
        for _, known, _ in answers:
            executor.optimizer.history.names.update(known)
