"""O and V of one stage, its norms, and the sum over the stages.

    barrier           O = step                  V = nothing
    post-validation   O = speculative step      V = the commit of a valid one

The state that they change is put back by `zbpp.profiling.kept`.
"""

import time
from collections.abc import Mapping

import torch

from zbpp.profiling.stopwatch import Spread, Stopwatch, spread
from zbpp.runtime.executor import Executor
from zbpp.runtime.optim.norms import squared_norms

__all__ = ["time_reduction", "time_steps"]

_WARM_UP = 2  # the first step makes the optimizer's state
_ROUNDS = 5


def time_steps(executor: Executor, watch: Stopwatch) -> None:
    """Time steps of one stage, whose parameters have gradients.

    Args:
        executor: of the stage.
        watch: where the times go, as "O", "V" and "norm".
    """
    share = executor.optimizer
    optimizers, stage = share.optimizers, executor.stage
    n_layers = 1 + max(index for index, _ in stage.numbered())
    speculates = share.speculates and not optimizers.needs_barrier
    for number in range(_WARM_UP + _ROUNDS):
        parameters = optimizers.parameters()
        counted = Stopwatch(stage.device) if number < _WARM_UP else watch
        counted.time("norm", squared_norms, stage, parameters, n_layers)
        if not optimizers:
            continue
        if not speculates:
            counted.time("O", _step, executor)
            continue
        counted.time("O", optimizers.speculate)
        counted.time("V", optimizers.commit)


def _step(executor: Executor) -> None:
    executor.optimizer.optimizers.step(skipped=False)


def time_reduction(
    executors: Mapping[int, Executor], length: int, rounds: int
) -> Spread:
    """Time the sum of a vector over the stages (every rank must call).

    From the start of the stage that is the last one: that stage waits the least, so no
    two clocks are compared. In one process there is nothing to wait for.

    Args:
        executors: of this process.
        length: of the vector.
        rounds: how many sums, after one for warming up.
    """
    if len(executors) > 1:
        return Spread(0.0, 0.0, 0.0, 0.0)
    (executor,) = executors.values()
    seconds = []
    transport = executor.transport
    vector = torch.zeros(length, dtype=torch.float64, device=executor.stage.device)
    for _ in range(rounds + 1):
        transport.gather(None)
        start = time.perf_counter()
        transport.reduce(vector.clone()).result()
        seconds.append(time.perf_counter() - start)
    transport.end()
    least = [min(row) for row in zip(*transport.gather(seconds), strict=True)]
    return spread(least[1:])
