"""Compare the requests of all processes of a pipeline before they begin."""

import hashlib
from collections.abc import Mapping

from zbpp.core import RequestError
from zbpp.runtime.executor import Executor
from zbpp.runtime.optim.norms import parameter_names

__all__ = ["check_agreement"]


def check_agreement(executors: Mapping[int, Executor], request: object) -> None:
    """Compare what the ranks were asked for, and exchange the parameters' names.

    Args:
        executors: of this process, by stage.
        request: its ``repr`` must be the same in all processes.

    Raises:
        RequestError: the ranks were asked for different things.
    """
    names = {
        layer: (stage, names)
        for stage, executor in executors.items()
        for layer, names in parameter_names(executor.stage).items()
    }
    transport = next(iter(executors.values())).transport
    digest = hashlib.sha256(repr(request).encode()).hexdigest()
    answers = transport.gather((digest, names))
    other = [rank for rank, (its, _) in enumerate(answers) if its != answers[0][0]]
    if other:
        raise RequestError(
            f"rank(s) {other} and rank 0 were started with different schedules, "
            "splits or settings; start all ranks with the same arguments"
        )
    for executor in executors.values():
        for _, known in answers:
            executor.optimizer.history.names.update(known)
