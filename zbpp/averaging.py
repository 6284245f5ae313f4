"""Replicas that step by themselves, and are averaged every few steps.

    replica 0   step 1 .. step k | average | step k+1 .. step 2k | average | ..
    replica 1   step 1 .. step k |         | step k+1 .. step 2k |         | ..

Each is a pipeline with its norms, decisions and optimizer state. An average waits for
the decision on the last step, so no rollback can undo it; buffers take no part.

`PeriodicModelAverager` of torch skips parameters without a gradient, which a step has
cleared, and gives the others new memory; the function that it calls is used here.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from zbpp.core import RequestError, a_kind
from zbpp.core.reductions import Reduction
from zbpp.runtime.comm.place import Place
from zbpp.runtime.driver.stages import LocalStages
from zbpp.runtime.executor import Executor
from zbpp.runtime.policies import DataParallel, check_count, is_number
from zbpp.runtime.support.collectives import is_broken
from zbpp.runtime.support.sharded import own_shard

__all__ = ["DiLoCo", "Periodic"]


@dataclass(frozen=True, kw_only=True)
class Periodic:
    """Replace parameters by their mean over the replicas (local SGD).

    Args:
        every: steps from one average to the next; the first one ends step ``every``.

    Raises:
        RequestError: a value is out of its range.
    """

    every: int

    def __post_init__(self) -> None:
        check_count("every", self.every or 0)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Periodic):
    """Step from the last average towards the mean, by SGD with Nesterov's momentum.

    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", arXiv 2311.08105.

    Args:
        every: steps from one average to the next; the first one ends step ``every``.
        outer_lr: learning rate for the way from the last average to the mean.
        outer_momentum: from 0 up to 1; with 0 and ``outer_lr=1`` it is `Periodic`.

    Raises:
        RequestError: a value is out of its range.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        lr, momentum = self.outer_lr, self.outer_momentum
        if not (is_number(lr) and lr > 0 and is_number(momentum) and 0 <= momentum < 1):
            raise RequestError(
                f"outer_lr is {lr!r} and outer_momentum {momentum!r}; give a rate "
                "above 0, and a momentum from 0 up to 1"
            )


def check_averaging(replicas: DataParallel, place: Place, *, steps: bool) -> None:
    """Refuse an average that makes no sense."""
    averaging, reason = replicas.averaging, None
    if averaging is None:
        return
    if not isinstance(averaging, Periodic):
        reason = f"it is {a_kind(averaging)}; give zbpp.averaging.Periodic(every=..)"
    elif place.apart is None:
        reason = "there is one replica; give a mesh whose dimension 'dp' is 2 or more"
    elif replicas.shard != "none":
        reason = f"shard is {replicas.shard!r}, and each replica needs all parameters"
    elif replicas.reduction != Reduction():
        reason = f"reduction is {replicas.reduction}, and replicas sum no gradients"
    elif not steps:
        reason = "optimizer is None, and it comes after the optimizer's step"
    if reason is not None:
        raise RequestError(f"averaging= makes no sense here: {reason}")


class Averager:
    """Averages the stages of this process over the replicas that step apart."""

    def __init__(self, policy: Periodic, place: Place, stages: LocalStages) -> None:
        assert place.apart is not None
        self._policy, self._stages = policy, stages
        self._group = place.apart.get_group()
        self.begin()

    def begin(self) -> None:
        """Begin at the parameters as they are, as if they were an average."""
        self.outer: list[torch.optim.Optimizer] = []
        """Of DiLoCo, one a stage; the state has the last average of each parameter."""
        if not isinstance(self._policy, DiLoCo):
            return
        lr, momentum = self._policy.outer_lr, self._policy.outer_momentum
        for executor in self._stages.executors.values():
            parameters = executor.optimizer.optimizers.parameters()
            outer = torch.optim.SGD(
                [{"params": parameters}],  # a stage may have none
                lr=lr,
                momentum=momentum,
                nesterov=momentum > 0,
                foreach=False,  # it cannot step DTensors and plain tensors together
            )
            for p in parameters:
                if p.requires_grad:
                    outer.state[p]["average"] = p.detach().clone()
            self.outer.append(outer)

    def after_step(self, n_steps: int) -> None:
        """Average, if it is time; all processes of all replicas must call.

        Raises:
            PeerError: another replica has ended.
        """
        if n_steps % self._policy.every:
            return
        self._stages.synchronize()
        transport = self._stages.transport
        transport.doing = f"the average after step {n_steps - 1}"
        with self._stages.running():
            try:
                for number, executor in enumerate(self._stages.executors.values()):
                    means = self._mean(executor)
                    if self.outer:
                        parameters = executor.optimizer.optimizers.parameters()
                        _follow(self.outer[number], parameters, means)
            except RuntimeError as error:
                if is_broken(error):
                    raise transport.lost_peer(transport.doing, error) from error
                raise

    @torch.no_grad()
    def _mean(self, executor: Executor) -> Sequence[Tensor]:
        """Give the parameters that learn their mean over the replicas.

        Where a number lies in a sum decides its bits: so layers are summed one by one,
        in which no mode differs, and tied parameters, which several have, alone.
        """
        means = []
        left = {
            x for x in executor.optimizer.optimizers.parameters() if x.requires_grad
        }
        ties = executor.stage.ties.plan
        tied = {ties.own_name(*place) for tie in ties.ties for place in tie}
        parts: dict[str | int, list[Tensor]] = defaultdict(list)
        for index, name, p in executor.stage.named_stepped():
            if p in left:
                left.remove(p)
                parts[name if name in tied else index].append(p)
        for part in parts.values():
            copies = [own_shard(p).detach() for p in part]
            average_parameters(iter(copies), self._group)
            for parameter, copy in zip(part, copies, strict=True):
                own_shard(parameter).copy_(copy)
            means += part
        return means


@torch.no_grad()
def _follow(
    outer: torch.optim.Optimizer, parameters: list[Tensor], means: Collection[Tensor]
) -> None:
    """Step all ``parameters``, of which some are ``means`` now, from the last average.

    A checkpoint may have had other rates, and a script may have added parameters.
    """
    outer.param_groups[0].update(outer.defaults, params=parameters)
    for p in means:
        last = outer.state[p].setdefault("average", p.detach().clone())
        p.grad = last - p
        p.copy_(last)
    outer.step()
    for p in means:
        p.grad = None
        outer.state[p]["average"].copy_(p)
