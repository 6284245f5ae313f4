"""transformers' ``Trainer`` with the steps of a pipeline, one stage a process.

trainer = PipelineTrainer(model, arguments, train_dataset=rows,
                          pipeline={"schedule": "ZBV", "n_microbatches": 8})
trainer.train()
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from replica_loader import replica_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

import zbpp


class PipelineTrainer(Trainer):
    """A ``Trainer`` whose batches are steps of a pipeline.

    Data, arguments, learning rates, logs, evaluation, checkpoints and callbacks stay
    the Trainer's. All stages of a replica read the same batch; there is no DDP.
    Samples a second are those of the Trainer: it counts every process as a replica.

    Args:
        pipeline: arguments of `zbpp.Pipeline` but for the model, ``optimizer`` and
            ``clip_grad_norm``, which are the Trainer's.

    Raises:
        zbpp.RequestError: an argument of the Trainer has no meaning for a pipeline, or
            this process has not exactly one optimizer.
    """

    def __init__(self, *args: Any, pipeline: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refuse()
        model: Any = self.model
        self.pipeline = zbpp.Pipeline(
            model,
            optimizer=self._make_optimizer,
            clip_grad_norm=self.args.max_grad_norm or None,
            **pipeline,
        )
        if len(self.pipeline.optimizers) != 1:
            raise zbpp.RequestError(
                f"a Trainer has one optimizer in each process, this one would have "
                f"{len(self.pipeline.optimizers)}: one stage a process, with parameters"
            )
        # It has stepped, and has no gradients, when the Trainer steps it.
        (self.optimizer,) = self.pipeline.optimizers
        self.accelerator.prepare_data_loader = self._prepare_loader
        self.accelerator.prepare_model = lambda model, **_: model
        self.accelerator.gather = lambda tensor: tensor  # every rank has all of it

    def _refuse(self) -> None:
        args = self.args
        instead = {
            "gradient_accumulation_steps": (1, "n_microbatches, with a larger batch"),
            "fp16": (False, "step=zbpp.StepPolicy(loss_scale=...)"),
            "bf16": (False, "numerics=zbpp.Numerics(autocast=torch.bfloat16)"),
            "torch_compile": (False, "execution=zbpp.Execution(compile='blocks')"),
            "label_smoothing_factor": (0.0, "loss_fn"),
        }
        for name, (usual, instruction) in instead.items():
            if getattr(args, name) != usual:
                raise zbpp.RequestError(
                    f"TrainingArguments({name}={getattr(args, name)}) has no effect on "
                    f"a pipeline: give {instruction} in pipeline={{...}}"
                )
        if self.optimizer is not None or self.compute_loss_func is not None:
            raise zbpp.RequestError(
                "optimizers= and compute_loss_func= of a Trainer are of a whole model: "
                "TrainingArguments(optim=...) makes an optimizer a stage, and "
                "pipeline={'loss_fn': ...} is the loss of a micro-batch"
            )

    def _make_optimizer(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Make a stage's optimizer as ``create_optimizer`` makes that of all."""
        model: Any = self.model
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, model)
        decayed = set(self.get_decay_parameter_names(model))
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": self.args.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                groups[name not in decayed]["params"].append(parameter)
        optimizer: torch.optim.Optimizer = kind(groups, **options)
        return optimizer

    def _prepare_loader(self, loader: DataLoader[Any], **_: Any) -> DataLoader[Any]:
        options = {"use_seedable_sampler": True, "data_seed": self.args.data_seed}
        return replica_loader(loader, self.pipeline, **options)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Train on one batch; the loss is its mean over tokens or samples."""
        model.train()
        self._result = self.pipeline.step(self._prepare_inputs(inputs))
        return torch.tensor(self._result.loss, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self._result.grad_norm  # they are clipped already

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        return self._result.grad_norm

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Any, Any]:
        """Evaluate one batch: loss, and logits and labels where they are asked for."""
        inputs = self._prepare_inputs(inputs)
        loss = torch.tensor(self.pipeline.evaluate(inputs, n_microbatches=1))
        if prediction_loss_only:
            return loss, None, None
        outputs = self.pipeline.predict(inputs, n_microbatches=1, everywhere=True)
        return loss, outputs["logits"], inputs["labels"]

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Write the whole model as ``from_pretrained`` reads it (all ranks call)."""
        parts = self.pipeline.gather(self.pipeline.state_dict()["model"])
        whole = {name: tensor for part in parts for name, tensor in part.items()}
        self._save(output_dir, whole)  # on the first rank

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.lr_scheduler is not None
        more = {"scheduler": self.lr_scheduler.state_dict()}
        self.pipeline.save(Path(output_dir) / "pipeline", extra=more, wait=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.lr_scheduler is not None:
            more = self.pipeline.load(Path(checkpoint) / "pipeline")
            self.lr_scheduler.load_state_dict(more["scheduler"])
