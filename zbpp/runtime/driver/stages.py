"""The stages of this process, from the first step to the end.

A failed step ends the pipeline: its state may be between two steps, so it is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.comm.transport import Reduction, Transport
from zbpp.runtime.executor import Executor
from zbpp.runtime.microbatches import merge
from zbpp.runtime.support.pytree import map_tensors


class LocalStages:
    """The stages of this process, by number; all of the pipeline where it is alone."""

    def __init__(self, executors: Mapping[int, Executor]) -> None:
        self.executors = executors
        stage_of = self.first.stage_of
        self.has_first = stage_of[0] in executors
        """The first chunk is here."""
        self._last = executors.get(stage_of[-1])
        self._is_running = False
        self._ended: str | None = None
        self._failure: str | None = None
        self.checkpoints: str | None = None
        """Folder of the last save or load."""
        settle = _Settle(self.synchronize)
        modules = dict.fromkeys(
            m for _, layer in self.layers() for m in layer.modules()
        )
        with_state: list[Any] = [*modules, *self.optimizers]
        self._hooks = [
            hook
            for x in with_state
            for hook in (
                x.register_state_dict_pre_hook(settle),
                x.register_load_state_dict_pre_hook(settle),
            )
        ]

    @property
    def first(self) -> Executor:
        """The executor of the first stage here, for what is the same on all."""
        return next(iter(self.executors.values()))

    @property
    def has_last(self) -> bool:
        """The last chunk is here."""
        return self._last is not None

    @property
    def transport(self) -> Transport:
        """The messages to the other processes."""
        return self.first.transport

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of these stages."""
        return [x for optimizers in self.optimizers_by_stage for x in optimizers]

    @property
    def optimizers_by_stage(self) -> list[list[torch.optim.Optimizer]]:
        """The optimizers of each of these stages."""
        return [x.optimizer.optimizers.all for x in self.executors.values()]

    @property
    def parameter_of(self) -> dict[Tensor, Tensor]:
        """Parameters of layers by their masters on the host."""
        hosts = [x.optimizer.host for x in self.executors.values()]
        return {master: p for x in hosts for master, p in x.parameter_of.items()}

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Global index and layer, stage after stage."""
        for executor in self.executors.values():
            yield from executor.stage.numbered()

    def residuals(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Parameters, and the residuals of their gradients (`TopK`)."""
        for executor in self.executors.values():
            if executor.collectives.top_k is not None:
                yield from executor.collectives.top_k.residuals().items()

    def gather_dict(self, by_key: Mapping[Any, Any]) -> dict[Any, Any]:
        """Join what this pipeline's processes know by stage or name; all must call."""
        joined: dict[Any, Any] = {}
        for part in self.transport.gather_pipeline(by_key):
            joined |= part
        return joined

    # Runs and failures.

    @property
    def has_ended(self) -> bool:
        """True if no call is taken any more: after `close`, or a failed step."""
        return self._ended is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this block programs run; after a failure in it nothing runs again."""
        self._refuse_after_failure()
        if self._ended is not None:
            raise RuntimeError(f"{self._ended}; build a new Pipeline")
        self._is_running = True
        try:
            with self.reporting():
                yield
        except BaseException as error:
            self._end_with(error)
            raise
        finally:
            self._is_running = False

    @contextmanager
    def reporting(
        self, doing: str | None = None, *, of_requests: bool = True
    ) -> Iterator[None]:
        """Tell the other processes of an error that leaves this block.

        Where ``of_requests`` is False, all find a `RequestError` themselves.
        """
        self.transport.doing = doing or self.transport.doing
        try:
            yield
        except BaseException as error:
            if of_requests or not isinstance(error, RequestError):
                self.transport.report(error)
            raise

    # State.

    def synchronize(self) -> None:
        """Settle the last step on every stage; refused within a step."""
        self._refuse_after_failure()
        if self._is_running:
            raise RuntimeError(
                "parameters and optimizer state are asked for in the middle of a step; "
                "note the wish (a signal handler sets a flag) and ask between steps"
            )
        with self.reporting():
            for executor in self.executors.values():
                try:
                    executor.optimizer.settle()
                except BaseException as error:
                    self._end_with(error)
                    raise

    def _end_with(self, error: BaseException) -> None:
        """End the pipeline: nothing can be right any more."""
        text = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
        self._ended = self._failure = f"{self.transport.doing} failed ({text})"
        self._release()

    def _release(self) -> None:
        """Leave the modules as a plain model's: tied, and without hooks."""
        for hook in self._hooks:
            hook.remove()
        for executor in self.executors.values():
            executor.stage.ties.end()

    def _refuse_after_failure(self) -> None:
        """Refuse every call after a failure, and name the last checkpoint."""
        if self._failure is None:
            return
        way_out = "no checkpoint was saved or loaded"
        if self.checkpoints is not None:
            way_out = f"load the last checkpoint, from {self.checkpoints}"
        raise RuntimeError(
            f"{self._failure}, and the pipeline has ended: its state may be between "
            f"two steps; build a new Pipeline ({way_out})"
        )

    def close(self) -> None:
        """Settle the last step, finish the messages, and release all resources."""
        if self._ended is not None:
            return
        self.synchronize()
        self._release()
        self._ended = "the pipeline is closed"
        self.flush()
        for executor in self.executors.values():
            executor.transport.close()

    def flush(self) -> None:
        """Wait until all sends have left, and free their tensors."""
        for executor in self.executors.values():
            executor.transport.flush()

    def abandon(self) -> None:
        """End a pipeline that was dropped without `close`, or when Python ends."""
        if self._ended is not None:
            return
        self._ended = "the pipeline was dropped"
        for executor in self.executors.values():
            executor.stage.ties.end()
            executor.transport.abandon()

    # Results of a run.

    def mean_loss(self) -> tuple[float, tuple[int | None, int | None]]:
        """Mean loss over all replicas; numbers of inputs and targets from any stage."""
        sums: list[Reduction] = []
        peers = self.transport.peers
        for executor in self.executors.values():
            table = executor.stage.loss.table()
            batch = executor.stage.batch
            # the samples count once a process
            counts = [] if sums else [batch.n_inputs or 0, batch.n_targets or 0]
            vector = torch.cat([table.flatten(), table.new_tensor(counts or [0, 0])])
            sums.append(executor.transport.reduce(vector))
        adds = self.first.stage.loss.adds
        rows = peers.rows(sums[0].result())
        losses, weights = (
            peers.replica_rows(rows)[:, :-2].reshape(-1, *table.shape).unbind(1)
        )
        n_inputs, n_targets = (int(count) or None for count in rows[peers.row, -2:])
        mean = float((losses * weights).sum() / (1 if adds else weights.sum()))
        return mean, (n_inputs, n_targets)

    def losses(self) -> torch.Tensor:
        """Losses of the micro-batches that have run; the last stage is here."""
        assert self._last is not None
        losses: torch.Tensor = self._last.stage.loss.table()[0]
        return losses

    def mean_metrics(self) -> Callable[[], dict[str, float]] | None:
        """Return what reads the metrics of the last run; None: it has none here."""
        if self._last is None or not self._last.stage.loss.metrics:
            return None
        return self._last.stage.loss.mean_metrics()

    def last_outputs(self, *, everywhere: bool = False) -> Any:
        """Take the outputs of all micro-batches, joined; None on other processes."""
        outputs: Any = None
        if (last := self._last) is not None:
            by_number, last.stage.outputs = last.stage.outputs, None
            if by_number is not None:
                outputs = merge([by_number[i] for i in sorted(by_number)])
        if not everywhere:
            return outputs
        on_host = map_tensors(outputs, lambda x: x.cpu())
        every = self.transport.gather_pipeline(on_host)
        return next((outputs for outputs in every if outputs is not None), None)


class _Settle:
    """A hook before a state is taken or loaded. Copies and pickles of it do nothing:
    a copied module has copies of its hooks, and is no part of the pipeline."""

    def __init__(self, action: Callable[[], None] | None = None) -> None:
        self._action = action

    def __call__(self, *_: Any, **__: Any) -> None:
        if self._action is not None:
            self._action()

    def __reduce__(self) -> tuple[type["_Settle"], tuple[()]]:
        return _Settle, ()


@contextmanager
def eval_mode(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Layers in eval mode; afterwards each module is in its former mode again."""
    modes = [
        (module, module.training) for layer in layers for module in layer.modules()
    ]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
