"""The surface of torch's pipeline schedules over a pipeline of ours.

pipeline = zbpp.Pipeline(model, plan, loss_fn=loss_fn, optimizer=None)
schedule = zbpp.TorchSchedule(pipeline)
schedule.step(inputs)                        # on the rank with the first chunk
schedule.step(target=targets, losses=losses) # on that with the last one
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zbpp.core import RequestError
from zbpp.pipeline.pipeline import Pipeline
from zbpp.runtime.loss import LossFn
from zbpp.runtime.microbatches import Batch


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
        arg_mbs: Sequence[Sequence[Any]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train on a batch (every rank must call).

        Args:
            args: of the model, or the inputs of the first layer: one, or a tuple of
                them; read where the first chunk is.
            target: for the loss; read where the last chunk is.
            losses: filled with the loss of each micro-batch where the last chunk is.
            return_outputs: return the last layer's outputs.
            arg_mbs: ``args`` of each micro-batch, in place of those of the batch.
            kwarg_mbs: ``kwargs`` of each micro-batch, in place of those of the batch.
            target_mbs: ``target`` of each micro-batch, in place of that of the batch.
            loss_kwargs: keyword arguments of the loss function, after outputs and
                targets.
            kwargs: of a model of transformers or ``zbpp.cut``, labels among them; the
                first layer of a list gets a dict.

        Returns:
            The outputs of all samples where the last chunk is, if asked for; else None.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died or did not answer.
        """
        result = self.pipeline.step(
            _inputs(args, kwargs, arg_mbs, kwarg_mbs),
            _targets(target, target_mbs),
            return_outputs=return_outputs,
            loss_fn=self._loss_fn(loss_kwargs),
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
        arg_mbs: Sequence[Sequence[Any]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward only, in eval mode (every rank must call).

        Arguments are those of `step`. Without ``losses`` none are computed, and no
        target is read.

        Returns:
            The outputs of all samples where the last chunk is, else None.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died or did not answer.
        """
        pipeline = self.pipeline
        with pipeline._forwards(
            _inputs(args, kwargs, arg_mbs, kwarg_mbs),
            _targets(target, target_mbs),
            None,
            reads_targets=losses is not None,
            keeps_outputs=True,
            loss_fn=self._loss_fn(loss_kwargs),
        ):
            outputs = pipeline.stages.last_outputs()
            if losses is not None and pipeline.needs_targets:
                losses[:] = pipeline.stages.losses().unbind()
        return outputs

    def _loss_fn(self, loss_kwargs: Mapping[str, Any] | None) -> LossFn | None:
        """The pipeline's loss function with keyword arguments; None: as it is."""
        if not loss_kwargs:
            return None
        return partial(self.pipeline.settings.loss_fn, **loss_kwargs)


def _inputs(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arg_mbs: Sequence[Sequence[Any]] | None,
    kwarg_mbs: Sequence[Mapping[str, Any]] | None,
) -> Batch:
    """Return the inputs of `Pipeline.step` for the arguments of a model.

    Raises:
        RequestError: they are given in two ways.
    """
    if arg_mbs is None and kwarg_mbs is None:
        return _model_inputs(args, kwargs)
    arg_mbs = arg_mbs or [()] * len(kwarg_mbs or ())
    kwarg_mbs = kwarg_mbs or [{}] * len(arg_mbs)
    if args or kwargs or len(arg_mbs) != len(kwarg_mbs):
        raise RequestError(
            "give either the arguments of the batch, or arg_mbs and kwarg_mbs with one "
            f"entry for each micro-batch; they have {len(arg_mbs)} and {len(kwarg_mbs)}"
        )
    parts = [_model_inputs(*part) for part in zip(arg_mbs, kwarg_mbs, strict=True)]
    return None if all(part is None for part in parts) else parts


def _targets(target: Batch, target_mbs: Sequence[Any] | None) -> Batch:
    if target is not None and target_mbs is not None:
        raise RequestError("give either target or target_mbs")
    return target if target_mbs is None else list(target_mbs)


def _model_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return inputs of the first layer, or of a model, for a call's arguments.

    Raises:
        RequestError: some have a name and some none.
    """
    if args and kwargs:
        raise RequestError(
            f"give all arguments of the model by name, or none: {len(args)} came "
            f"without one, and {', '.join(kwargs)}"
        )
    if kwargs:
        return dict(kwargs)
    return args[0] if len(args) == 1 else tuple(args) or None
