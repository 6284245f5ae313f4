"""The surface of torch's pipeline schedules over a pipeline of ours.

pipeline = zbpp.Pipeline(model, plan, loss_fn=loss_fn, optimizer=None)
schedule = zbpp.TorchSchedule(pipeline)
schedule.step(inputs)                        # on the rank with the first chunk
schedule.step(target=targets, losses=losses) # on that with the last one
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.core import RequestError
from zbpp.pipeline import Pipeline
from zbpp.runtime.microbatches import Batch

__all__ = ["TorchSchedule"]

_NOT_TAKEN = {"arg_mbs", "kwarg_mbs", "target_mbs", "loss_kwargs"}
"""Keywords of torch's schedules that are no arguments of a model."""


class TorchSchedule:
    """The methods that a trainer calls of ``torch.distributed.pipelining``'s schedules.

    Without an optimizer in the pipeline a step leaves gradients of the mean loss, as
    torch's schedules do with ``scale_grads=True``, and the trainer clips, steps and
    clears. They are added to those that are there, which torch's divide once more.
    With an optimizer the step is complete, clipped and post-validated, and a trainer
    that steps ``pipeline.optimizers`` after it finds no gradients and changes nothing.

    Args:
        pipeline: ``needs_inputs`` and ``needs_targets`` of it tell a trainer whether
            this rank has the first stage and the last, ``named_parameters`` what it
            trains here.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def step(
        self,
        *args: Any,
        target: Batch = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Train on a batch (every rank must call).

        Args:
            args: of the model, or the inputs of the first layer: one, or a tuple of
                them; read where the first chunk is.
            target: for the loss; read where the last chunk is.
            losses: filled with the loss of each micro-batch where the last chunk is.
            return_outputs: return the last layer's outputs.
            kwargs: of a model of transformers or ``zbpp.cut``, labels among them; the
                first layer of a list gets a dict.

        Returns:
            The outputs of all samples where the last chunk is, if asked for; else None.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died or did not answer.
        """
        result = self.pipeline.step(
            self._inputs(args, kwargs), target, return_outputs=return_outputs
        )
        if losses is not None and self.pipeline.needs_targets:
            numbers = torch.tensor(result.losses, device=self.pipeline.device)
            losses[:] = numbers.unbind()
        return result.outputs

    def eval(
        self,
        *args: Any,
        target: Batch = None,
        losses: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward only, in eval mode (every rank must call).

        Args:
            args: as for `step`.
            target: as for `step`.
            losses: as for `step`; None: losses are not computed, and no target is read.
            kwargs: as for `step`.

        Returns:
            The outputs of all samples where the last chunk is, else None.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died or did not answer.
        """
        pipeline = self.pipeline
        inputs, targets = pipeline._batches.pair(self._inputs(args, kwargs), target)
        with pipeline._forwards(
            inputs, targets, None, predicts=losses is None, keeps_outputs=True
        ):
            outputs = pipeline.stages.last_outputs()
            if losses is not None and pipeline.needs_targets:
                losses[:] = pipeline.stages.losses().unbind()
        return outputs

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """Return what `Pipeline.step` takes for the arguments of a model.

        Raises:
            RequestError: some have a name and some none, or one is torch's own.
        """
        if refused := sorted(_NOT_TAKEN & kwargs.keys()):
            raise RequestError(
                f"{', '.join(refused)} of torch's schedules is not taken: give the "
                "whole batch, and loss_fn where the pipeline is made"
            )
        if args and kwargs:
            raise RequestError(
                f"give all arguments of the model by name, or none: {len(args)} came "
                f"without one, and {', '.join(kwargs)}"
            )
        if kwargs:
            return dict(kwargs)
        return args[0] if len(args) == 1 else tuple(args) or None
