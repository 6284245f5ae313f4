"""What all contenders have in common, and what they are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.bench.micro import StepBatch
from zbpp.bench.request import BenchRequest
from zbpp.core import RequestError

if TYPE_CHECKING:
    from zbpp.training.profiled import UsersModel

__all__ = ["Contender", "Field", "autocast_of", "gather", "make_optimizer", "own_loss"]

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


class Contender(Protocol):
    """A model cut into stages, trained by a schedule; this process's share."""

    n_jobs: int
    """F, B, W and BW of this process in a step."""

    def step(self) -> None:
        """Train on the batch once, optimizer included."""

    def settle(self) -> None:
        """Wait for what the last step still has to decide."""

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this process's parameters by ``layers.<index>.<name>``."""

    def close(self) -> None:
        """End."""


@dataclass(frozen=True)
class Field:
    """Alike for all contenders: what is asked for, where they run, and their batch."""

    request: BenchRequest
    device: torch.device
    batch: StepBatch

    def model(self) -> "UsersModel":
        """The model with the weights that it starts with, in every call the same."""
        torch.manual_seed(self.request.seed)
        return self.request.load()


def own_loss(outputs: Tensor, targets: object) -> Tensor:
    """The last layer has put it out."""
    return outputs


def autocast_of(request: BenchRequest) -> torch.dtype | None:
    """Compute dtype of the forward."""
    return _DTYPES[request.dtype]


def make_optimizer(
    request: BenchRequest,
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes the optimizer of a stage, alike for all contenders.

    Raises:
        RequestError: torch.optim has none of this name.
    """
    known = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    kind: Any = known.get(request.optimizer.lower())
    if kind is None:
        raise RequestError(
            f"--optimizer {request.optimizer}: torch.optim has none of this name; "
            f"choose one of {', '.join(sorted(known))}"
        )
    more = {"fused": True} if kind in (torch.optim.Adam, torch.optim.AdamW) else {}
    return lambda parameters: kind(parameters, lr=1e-5, **more)


def gather(thing: Any) -> list[Any]:
    """Give every process the picklable things of all, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found
