"""Notice parameters that are put into layers after the pipeline was built.

    layer.weight = nn.Parameter(...)    the optimizer steps the one before

Optimizers, sums over replicas and norms hold the parameters of the start. One that
comes later would be trained by nobody, without a word.
"""

from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.comm.peers import Peers
from zbpp.runtime.executor import Executor

__all__ = ["LateParameters"]


class LateParameters:
    """Remembers what one stage's layers held at the start.

    Args:
        executor: of the stage.
        peers: processes of the stage.
    """

    def __init__(self, executor: Executor, peers: Peers) -> None:
        self._executor = executor
        self._has_peers = peers.n > 1
        stage = executor.stage
        both = (*stage.named_leaves(), *stage.named_stepped())
        self._held: set[Tensor] = {p for *_, p in both}
        self._look()

    def check(self) -> None:
        """Compare what the layers hold now; in C, as every step does so.

        Raises:
            RequestError: it names the parameters that nobody would train.
        """
        now = chain.from_iterable(map(dict.values, self._tables))
        if sum(map(len, self._tables)) == len(self._seen) and all(
            map(is_, now, self._seen)
        ):
            return
        trained = self._trained()
        late = [
            name
            for _, name, p in self._executor.stage.named_leaves()
            if p.requires_grad and p not in trained
        ]
        if late:
            raise RequestError(
                f"{', '.join(late[:3])}{', ...' if len(late) > 3 else ''} was put into "
                "its layer after the pipeline was built, so nothing would train it; "
                "write into the parameter that was there (with torch.no_grad(): "
                "p.copy_(...)), or build a new Pipeline"
            )
        self._look()

    def _trained(self) -> set[Tensor]:
        """The parameters of the start; without peers, also those of the optimizers."""
        if self._has_peers:
            return self._held
        return self._held | set(self._executor.optimizer.optimizers.parameters())

    def _look(self) -> None:
        """Remember the parameters and the modules of each module."""
        modules: list[Any] = [
            module
            for _, layer in self._executor.stage.numbered()
            for module in layer.modules()
        ]
        self._tables: list[dict[str, Any]] = [
            table for x in modules for table in (x._parameters, x._modules)
        ]
        self._seen = tuple(chain.from_iterable(map(dict.values, self._tables)))
