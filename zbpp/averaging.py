"""Pipelines that step independently, and whose parameters are averaged periodically.

    replica 0   step 1 .. step k | average | step k+1 .. step 2k | average | ..
    replica 1   step 1 .. step k |         | step k+1 .. step 2k |         | ..

Each has its norms, decisions, optimizer state and checkpoints. An average waits for the
decision on the last step, so no rollback can undo it; buffers take no part.

`PeriodicModelAverager` of torch skips parameters without a gradient, which a step has
cleared, and gives the others new memory.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zbpp.core import RequestError
from zbpp.runtime.driver.stages import LocalStages
from zbpp.runtime.parallel.broadcast import broadcast
from zbpp.runtime.policies import check_count, is_number
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


class Averager:
    """Averages the stages of this process with those of other pipelines.

    All of these pipelines must make one; they begin with the numbers of the first.
    """

    def __init__(
        self, policy: Periodic, replicas: DeviceMesh, stages: LocalStages
    ) -> None:
        self._policy, self._group, self._stages = policy, replicas.get_group(), stages
        stages.synchronize()
        for _, layer in stages.layers():
            for tensor in (*layer.parameters(), *layer.buffers()):
                broadcast(tensor, self._group)
        self.begin()

    def _parameters(self) -> list[list[Tensor]]:
        """Those that learn, of each stage."""
        every = (x.optimizer.optimizers for x in self._stages.executors.values())
        return [[p for p in x.parameters() if p.requires_grad] for x in every]

    def begin(self) -> None:
        """Begin at the parameters as they are, as if they were an average."""
        self.outer: list[torch.optim.Optimizer] = []
        """Of DiLoCo, one a stage; the state has the last average of each parameter."""
        if not isinstance(self._policy, DiLoCo):
            return
        for parameters in self._parameters():
            outer = torch.optim.SGD(
                [{"params": parameters}],  # a stage may have none
                lr=self._policy.outer_lr,
                momentum=self._policy.outer_momentum,
                nesterov=self._policy.outer_momentum > 0,
                foreach=False,  # it cannot step DTensors and plain tensors together
            )
            for p in parameters:
                outer.state[p]["average"] = p.detach().clone()
            self.outer.append(outer)

    def after_step(self, n_steps: int) -> None:
        """Average, if it is time; all processes of all pipelines must call.

        Raises:
            RequestError: they have other policies, or have taken other steps.
            PeerError: another pipeline has ended.
        """
        if n_steps % self._policy.every:
            return
        self._stages.synchronize()
        transport = self._stages.transport
        transport.doing = f"the average after step {n_steps - 1}"
        with self._stages.running():
            try:
                self._check(n_steps)
                for number, parameters in enumerate(self._parameters()):
                    self._average(parameters)
                    if self.outer:
                        _follow(self.outer[number], parameters)
            except RuntimeError as error:
                if is_broken(error):
                    raise transport.lost_peer(transport.doing, error) from error
                raise

    def _check(self, n_steps: int) -> None:
        """Refuse to average what is not the same step of the same run."""
        facts: list[object] = [None] * self._group.size()
        dist.all_gather_object(facts, (n_steps, self._policy), group=self._group)
        if any(fact != facts[0] for fact in facts):
            raise RequestError(
                f"pipelines average after other steps, or in other ways: {facts}; give "
                "all of them one policy, and load the same step"
            )

    @torch.no_grad()
    def _average(self, parameters: list[Tensor]) -> None:
        """One by one: where a number lies in a sum may decide its last bit."""
        for p in parameters:
            mean = own_shard(p).detach() / self._group.size()
            dist.all_reduce(mean, group=self._group)
            own_shard(p).copy_(mean)


@torch.no_grad()
def _follow(outer: torch.optim.Optimizer, means: list[Tensor]) -> None:
    """Step from the last average to where parameters are ``means`` now.

    A checkpoint may have had other rates, and a script may have thawed parameters.
    """
    outer.param_groups[0].update(outer.defaults, params=means)
    for p in means:
        last = outer.state[p].setdefault("average", p.detach().clone())
        p.grad = last - p
        p.copy_(last)
    outer.step()
    for p in means:
        p.grad = None
        outer.state[p]["average"].copy_(p)
