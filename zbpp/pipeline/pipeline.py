"""The API in a user's script: one object, one call a step.

    pipeline = zbpp.Pipeline(model, "ZBH1", loss_fn=loss_fn, optimizer=make_optimizer,
                             n_microbatches=16, clip_grad_norm=1.0)
    for inputs, targets in loader:
        result = pipeline.step(inputs, targets)

This file wires the layers together: plan -> programs -> executors.
"""

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.averaging import Averager, Periodic
from zbpp.checkpoint.local import State
from zbpp.checkpoint.state import Checkpoints
from zbpp.core import (
    Collective,
    CollectiveKind,
    Program,
    RequestError,
    Schedule,
    ranges_of,
    schedule_text,
)
from zbpp.core.replicas import reduces_every
from zbpp.diagnostics import split_warning
from zbpp.models import Tie, layered_of
from zbpp.models.entry import AnyModel
from zbpp.pipeline.arguments import (
    Processes,
    check_arguments,
    device_of,
    join,
    loss_of,
    warn_of_plan,
    weigh_of,
)
from zbpp.planning import Plan, PlanRequest
from zbpp.planning.make import choose_validation, plan_pipeline
from zbpp.runtime.backward.self_check import check_split
from zbpp.runtime.comm.place import TENSOR_DIM
from zbpp.runtime.driver.agreement import agreement
from zbpp.runtime.driver.batches import Batches, StepPart, parts_of_step
from zbpp.runtime.driver.build import Settings, build
from zbpp.runtime.driver.stages import eval_mode
from zbpp.runtime.executor import drive
from zbpp.runtime.loss import LossFn, loss_modules
from zbpp.runtime.microbatches import Batch, MicroBatches, check_samples
from zbpp.runtime.optim.decision import StepResult
from zbpp.runtime.optim.make import MakeOptimizer, check_optimizer
from zbpp.runtime.parallel.wrap import check_replicas
from zbpp.runtime.policies import (
    Execution,
    LossScaler,
    Numerics,
    StepPolicy,
    check_count,
)
from zbpp.runtime.support.devices import is_out_of_memory
from zbpp.runtime.ties.plan import TiePlan, check_ties
from zbpp.schedules import add_collectives, lower, lower_forward
from zbpp.tuning import make_watcher

_forward_programs = lru_cache(maxsize=2)(lower_forward)


class Pipeline:
    """A model cut into stages, trained by a schedule.

    Under torch.distributed (``torchrun`` is enough) this process is one stage; else
    all stages live in this process. Losses, gradients and parameters are the same.

    Args:
        model: an `nn.Sequential`, a list of layers, a model of transformers, or the
            result of `zbpp.cut` or `zbpp.layers_from`. Layers that other processes
            train lose their weights here: they would be stale after a step.
        schedule: a mode such as ``"ZBH1"``, a schedule or plan file, a `Schedule`, or a
            `Plan`, which `zbpp.plan_model` makes.
        optimizer: called with each stage's parameters, also frozen ones, or with pairs
            of name and parameter if its argument is called ``named_parameters``; gives
            one, or a list, which may be empty. None leaves gradients, of the mean loss
            of the batch, to the caller.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over one micro-batch; None: the
            loss of the model.
        n_stages: number of stages; None: the schedule's, or one per process.
        n_microbatches: micro-batches in a step; None: the schedule's.
        clip_grad_norm: largest norm of all gradients of all stages; None: any.
        mesh: the processes: a mesh of stages, data, context, expert and tensor
            parallelism (see `zbpp.mesh`), or a `zbpp.DataParallel`, with options of
            replicas; None: each process is a stage.
        device: where the layers live; ``"cuda"``: this process's GPU; None: that, or
            the CPU where there is none.
        numerics: options that decide the bits.
        step: when the optimizer steps.
        execution: how passes are executed and waited for.

    Raises:
        RequestError: the model, the schedule and the stages do not fit together.
    """

    def __init__(
        self,
        model: AnyModel,
        schedule: str | Path | Schedule | Plan = "ZBH1",
        *,
        optimizer: MakeOptimizer | None,
        loss_fn: LossFn | None = None,
        n_stages: int | None = None,
        n_microbatches: int | None = None,
        clip_grad_norm: float | None = None,
        mesh: Processes | None = None,
        device: torch.device | str | None = None,
        numerics: Numerics = Numerics(),
        step: StepPolicy = StepPolicy(),
        execution: Execution = Execution(),
    ) -> None:
        self.device = device_of(device)
        self.place, replicas = join(
            mesh,
            device=self.device,
            n_stages=n_stages,
            timeout_s=execution.start_timeout_s,
        )
        self.rank, self.n_ranks = self.place.rank, self.place.n_ranks
        with agreement(self.place.gather) as facts:
            check_optimizer(optimizer)
            check_arguments(
                loss_fn=loss_fn,
                n_stages=n_stages,
                n_microbatches=n_microbatches,
                clip_grad_norm=clip_grad_norm,
                numerics=numerics,
                step=step,
                execution=execution,
            )
            check_replicas(replicas, self.place, loss_scale=step.loss_scale)
            if execution.partition_activations and TENSOR_DIM not in self.place.dims:
                raise RequestError(
                    "partition_activations is on, and no other process has the same "
                    "activations; give a mesh whose dimension 'tp' is 2 or more, or "
                    "leave it out"
                )
            self.layered = layered_of(model)
            self.n_layers = self.layered.n_layers
            loss_fn = loss_of(self.layered, loss_fn)
            check_split()
            self.plan = plan_pipeline(
                PlanRequest(
                    schedule=schedule, n_stages=n_stages, n_microbatches=n_microbatches
                ),
                n_layers=self.n_layers,
                n_ranks=self.place.n_stages,
            )
            self.schedule = choose_validation(
                self.plan.schedule, step.post_validation, steps=optimizer is not None
            )
            if not self.schedule.is_post_validated:
                step = replace(step, post_validation=False)
            if optimizer is None:
                if step.offload_optimizer:
                    raise RequestError(
                        "offload_optimizer is on, but optimizer is None: there is no "
                        "state to keep; give an optimizer, or leave it out"
                    )
                step = replace(step, max_consecutive_skips=None)
            placement = self.schedule.placement
            split = self.schedule.split or ()
            self.split = tuple(ranges_of(split))
            weigh = weigh_of(
                loss_fn,
                numerics.weigh,
                self.layered.weigh
                or ("tokens" if self.place.n_sequence_slices > 1 else "samples"),
            )
            self.settings = Settings(
                ties=TiePlan(
                    check_ties(set(self.layered.ties), self.n_layers),
                    self.split,
                    placement,
                    self.layered.own_name,
                ),
                step=step,
                clip_grad_norm=clip_grad_norm,
                numerics=replace(numerics, weigh=None if callable(weigh) else weigh),
                execution=execution,
                replicas=replicas,
                recompute=self.schedule.recomputed_layers(split),
                weigh=weigh,
                loss_fn=loss_fn,
                optimizer=optimizer,
                device=self.device,
            )
            ties = self.settings.ties
            programs = lower(self.schedule, ties=ties.chunks)
            text = schedule_text(self.schedule)
            # the last two decide the order of messages and collectives
            passes = (
                execution.compile,
                execution.overlap,
                execution.partition_activations,
            )
            facts["schedules, splits or settings"] = text, self.settings, passes
        warn_of_plan(self.schedule, schedule, n_stages=n_stages, n_ranks=self.n_ranks)
        self.stages = build(
            self.settings,
            programs,
            self.place,
            self.layered.build,
            self.layered.parts,
        )
        self._use(self.schedule)
        self.n_switches = 0
        """Times that the schedule was changed."""
        self.n_steps = numerics.first_step
        """Steps done so far, those before ``first_step`` included."""
        self._batches = Batches(self.stages, self.layered.cut_batch, weigh=weigh)
        weakref.finalize(self, self.stages.abandon)
        self._watcher = make_watcher(execution.watch, self.plan)
        self._checkpoints = Checkpoints(
            self.stages,
            self.layered.own_name,
            (*ties.ties, *self.layered.buffers),
            rank=self.rank,
        )
        self._part: StepPart | None = None
        """Calls of the step that `optim_step` will take."""
        self._has_stepped = False

    # Training.

    def step(
        self,
        inputs: Batch = None,
        targets: Batch = None,
        *,
        return_outputs: bool = False,
        loss_fn: LossFn | None = None,
        key: Any = None,
    ) -> StepResult:
        """Train on one batch: all micro-batches, then the optimizer.

        Args:
            inputs: for the first chunk; read only where `needs_inputs`. Tensors of
                shape (samples, ...), alone or in tuples and dicts, or a list with one
                entry per micro-batch. A model that knows how to cut its batch (one of
                Hugging Face's does) takes it whole here, without targets, on the ranks
                that need either.
            targets: for the loss; read only where `needs_targets`.
            return_outputs: keep the last layer's outputs, for ``result.outputs`` on
                the last stage; asked for there, or on every rank.
            loss_fn: of this step, in place of the pipeline's.
            key: numbers of the samples in the data set, a tensor or a list. Every step
                compares the inputs and targets of the first and the last stage, if
                both stages get both; best give both on all ranks. Where ranks get only
                the part that they read, the key is compared instead.

        Raises:
            RequestError: the batch does not fit, or the first and the last stage read
                different samples; after a post-validated step the next call raises it,
                and rolls the step back.
            PeerError: another stage died or did not answer.
        """
        if self._part is not None:
            raise RequestError(
                "step() is forward_backward() and optim_step() in one; after "
                "forward_backward() call optim_step()"
            )
        call = MicroBatches(
            self.n_microbatches,
            self.n_steps,
            keeps_outputs=return_outputs,
            loss_fn=loss_fn,
        )
        self._batches.begin(inputs, targets, call, key=key)
        self._run(self._programs)
        result = self._end_step(return_outputs=return_outputs)
        if self._watcher is not None:
            with self.stages.reporting():
                self._watcher.after_step(self)
        return result

    def forward_backward(
        self,
        inputs: Batch = None,
        targets: Batch = None,
        *,
        n_calls: int,
        loss_fn: LossFn | None = None,
        key: Any = None,
    ) -> None:
        """Add the gradients of one batch; `optim_step` steps after ``n_calls`` calls.

        ``step`` is one call and an `optim_step`. Several calls have the loss, the
        gradients and the norm of one step with the micro-batches of all, to the bit.
        The first call after an `optim_step` validates it, where steps are
        post-validated. Every rank must call.

        Args:
            inputs: as for `step`.
            targets: as for `step`.
            n_calls: calls before the next `optim_step`, the same in each of them.
            loss_fn: of this call, in place of the pipeline's.
            key: as for `step`; `optim_step` finds differences.

        Raises:
            RequestError: the batch does not fit, or has another size than that of the
                call before, unless the loss is a sum; or steps of this pipeline cannot
                be taken in parts: there are replicas, or no optimizer.
            PeerError: another stage died or did not answer.
        """
        if self._part is None:
            self._refuse_parts()
            check_count("n_calls", n_calls)
        part = self._part or StepPart(n_calls)
        if n_calls != part.n_calls:
            raise RequestError(
                f"n_calls is {n_calls}, and {part.n_calls} in the first call"
            )
        if part.n_done == part.n_calls:
            raise RequestError(
                f"there were {part.n_calls} calls of forward_backward(), all of "
                "n_calls; call optim_step()"
            )
        call = MicroBatches(
            self.n_microbatches,
            self.n_steps,
            first=part.n_done * self.n_microbatches,
            is_part=True,
            loss_fn=loss_fn,
        )
        self._batches.begin(inputs, targets, call, part=part, key=key)
        self._run(self._passes)
        part.n_done += 1
        self._part = part

    def optim_step(self) -> StepResult:
        """Clip and step by the gradients of the `forward_backward` calls before.

        Returns:
            The result over the micro-batches of all calls.

        Raises:
            RequestError: there were not ``n_calls`` calls.
            PeerError: another stage died or did not answer.
        """
        part = self._part
        if part is None:
            raise RequestError("optim_step() comes after forward_backward()")
        if part.n_done < part.n_calls:
            raise RequestError(
                f"optim_step() comes after {part.n_calls} calls of forward_backward() "
                f"(n_calls); there {'was' if part.n_done == 1 else 'were'} "
                f"{part.n_done}"
            )
        self._part = None
        for executor in self.stages.executors.values():
            executor.batch = None  # it was that of the last call
        self._run(self._ends)
        return self._end_step(return_outputs=False)

    def _run(self, programs: Sequence[Program]) -> None:
        """Run the programs of a step, or of part of a step."""
        try:
            with self.stages.running():
                drive(self.stages.executors, programs)
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(
                    f"out of memory in {self.schedule.name} with {self.n_microbatches} "
                    "micro-batches: `zbpp estimate` shows which modes, splits and "
                    "sizes fit, `zbpp doctor` what this machine has"
                )
            raise

    def _refuse_parts(self) -> None:
        """Refuse to take a step in parts where the engine cannot."""
        reason = None
        if self.settings.optimizer is None:
            reason = "optimizer is None; clear the gradients, and call step()"
        elif self.place.sum_dims() or self.stages.first.collectives.has_units:
            reason = "replicas sum their gradients within the passes"
        if reason is not None:
            raise RequestError(
                f"this pipeline takes no step in parts: {reason}; give step() more "
                "micro-batches in place of several forward_backward() calls"
            )

    def _refuse_between_parts(self) -> None:
        """Refuse calls that would lose gradients before a step has used them."""
        if self._part is not None:
            raise RequestError(
                "gradients of forward_backward() wait for optim_step(); call it first"
            )

    def _end_step(self, *, return_outputs: bool) -> StepResult:
        """Count a step that has run, and return its result."""
        self.n_steps += 1
        stages = self.stages
        result = stages.first.optimizer.result
        assert result is not None
        if not self._has_stepped:
            self._has_stepped = True
            if (warning := split_warning(self)) is not None:
                warnings.warn(warning, stacklevel=3)
            with stages.reporting():
                for executor in stages.executors.values():
                    executor.stage.loss.check_buffers()
        if (mean_metrics := stages.mean_metrics()) is not None:
            result.mean_metrics = mean_metrics
        if return_outputs:
            result.outputs = stages.last_outputs()
        if self._checkpoints.averager is not None:
            self._checkpoints.averager.after_step(self.n_steps)
        return result

    def switch(self, schedule: Schedule | Plan) -> None:
        """Run the next steps by another schedule (every rank must call, with the same).

        Layers stay where they are, and steps are validated as before. Gradients are
        added in micro-batch order, so losses and parameters are those of a run without
        the switch, to the bit; with ``exact_sums=False`` they are rounded differently.

        Args:
            schedule: or a plan, with the placement and the micro-batches of the present
                one.

        Raises:
            RequestError: placement, micro-batches or split differ from the present
                ones; or the schedules of the ranks differ.
            PeerError: another stage died or does not switch.
        """
        self._refuse_between_parts()
        if isinstance(schedule, Plan):
            schedule = schedule.schedule
        if not isinstance(schedule, Schedule):
            sizes = f"n_stages={self.schedule.n_stages}, n_microbatches="
            raise RequestError(
                f"switch takes a Schedule or a Plan, not {schedule!r:.60}; "
                f"zbpp.plan(mode, {sizes}{self.schedule.n_microbatches}) returns one"
            )
        split = tuple(map(len, self.split))
        for what, before, after in (
            ("placement", *(x.placement.stage_of for x in (self.schedule, schedule))),
            ("micro-batches", self.n_microbatches, schedule.n_microbatches),
            ("split", split, schedule.split or split),
        ):
            if after != before:
                raise RequestError(
                    f"the schedule to switch to has the {what} {after}; the pipeline "
                    f"runs {before}: build a new Pipeline for another, from a "
                    "checkpoint"
                )
        schedule = choose_validation(schedule, self.schedule.is_post_validated)
        lower(
            schedule, ties=self.settings.ties.chunks
        )  # it may be that it cannot be run
        layers = schedule.recomputed_layers(list(split))
        self.synchronize()
        with agreement(self.stages.transport.gather) as facts:
            facts["schedules"] = schedule_text(schedule)
        self._use(schedule)
        for executor in self.stages.executors.values():
            executor.stage.recompute(layers)
            executor.times.forget()
        self.n_switches += 1

    def _use(self, schedule: Schedule) -> None:
        """Make the programs of a schedule, with the collectives of replicas.

        A schedule that has collectives keeps them where they are. One process alone
        has them where `fully_shard` has wrapped layers over a mesh of one: reductions
        then write the gradients.
        """
        transport, settings = self.stages.transport, self.settings
        overlaps, adds_up = settings.execution.overlap, False
        if not overlaps:
            schedule = replace(schedule, parts=None)
        collectives = self.stages.first.collectives
        copies = settings.step.offload_optimizer
        if (
            copies
            or self.place.sum_dims()
            or any(transport.gather(collectives.has_units))
        ):
            shards = any(transport.gather(collectives.keeps))
            each = reduces_every(settings.replicas.shard)
            kinds = {x.kind for x in schedule.orders[0] if isinstance(x, Collective)}
            if schedule.parts is not None and not shards and not each:
                adds_up = True
            elif not kinds or (CollectiveKind.UNSHARD in kinds) != (shards or copies):
                schedule = add_collectives(
                    schedule,
                    shards=shards or copies,
                    reduces="every" if each else "last",
                )
        self.schedule = schedule
        self._programs = lower(
            schedule,
            ties=settings.ties.chunks,
            costs=self.plan.known_costs,
            on_device=transport.on_device,
            overlaps=overlaps,
            adds_up=adds_up,
        )
        self._passes, self._ends = parts_of_step(self._programs)

    # Evaluation.

    def evaluate(
        self,
        inputs: Batch = None,
        targets: Batch = None,
        *,
        n_microbatches: int | None = None,
        metrics: dict[str, float] | None = None,
    ) -> float:
        """Mean loss over a batch, without gradients, in eval mode.

        Args:
            inputs: as for `step`.
            targets: as for `step`.
            n_microbatches: any number, the same on every rank; None: as in `step`.
            metrics: filled on the last stage with the means of the metrics that
                ``loss_fn`` returns.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died, did not answer, or does not evaluate.
        """
        with self._forwards(inputs, targets, n_microbatches):
            loss, samples = self.stages.mean_loss()
            if metrics is not None:
                read = self.stages.mean_metrics() or dict
                metrics.update(read())
        check_samples(*samples)
        return loss

    def predict(
        self,
        inputs: Batch = None,
        *,
        n_microbatches: int | None = None,
        everywhere: bool = False,
    ) -> Any:
        """Outputs of the last chunk, without loss and gradients, in eval mode.

        Args:
            inputs: as for `step`; targets in it are not read.
            n_microbatches: any number, the same on every rank; None: as in `step`.
            everywhere: give all ranks the outputs, on the CPU; the same on every rank.

        Returns:
            The outputs of all samples where the last chunk is, elsewhere None. Tensors
            of the micro-batches are joined along their first dimension; micro-batches
            whose outputs differ in others come as a list.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died, did not answer, or does not predict.
        """
        with self._forwards(inputs, None, n_microbatches, reads_targets=False):
            return self.stages.last_outputs(everywhere=everywhere)

    @contextmanager
    def _forwards(
        self,
        inputs: Batch,
        targets: Batch,
        n: int | None,
        *,
        reads_targets: bool = True,
        keeps_outputs: bool = False,
        loss_fn: LossFn | None = None,
    ) -> Iterator[None]:
        """Run the forwards of a batch; within this their losses or outputs are read."""
        self._refuse_between_parts()
        call = MicroBatches(
            n or self.n_microbatches,
            self.n_steps,
            training=False,
            keeps_outputs=keeps_outputs or not reads_targets,
            loss_fn=loss_fn,
        )
        programs = _forward_programs(
            self.schedule.placement, n_microbatches=call.n_microbatches
        )
        self.synchronize()
        self._batches.begin(inputs, targets, call, reads_targets=reads_targets)
        modules = [layer for _, layer in self.stages.layers()]
        modules += loss_modules(loss_fn or self.settings.loss_fn)
        with self.stages.running(), eval_mode(modules):
            drive(self.stages.executors, programs, training=False)
            yield
            self.stages.flush()

    # Views, which differ between processes.

    @property
    def n_microbatches(self) -> int:
        """Micro-batches in a training step."""
        return self.schedule.n_microbatches

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that several layers share: (layer, name in it) of each."""
        return self.settings.ties.ties

    @property
    def needs_inputs(self) -> bool:
        """True if this process has the first chunk; others ignore the inputs."""
        return self.stages.has_first

    @property
    def needs_targets(self) -> bool:
        """True if this process has the last chunk; others ignore the targets."""
        return self.stages.has_last

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this process's stages, for instance for LR schedulers."""
        return self.stages.optimizers

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The loss scale, as validated; setting its state sets that of one process."""
        self.synchronize()
        return self.stages.first.optimizer.history.scaler

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """This process's layers as ``layers.<global index>``, validated."""
        self.synchronize()
        for index, layer in self.stages.layers():
            yield f"layers.{index}", layer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters by the model's names, validated."""
        self.synchronize()
        for executor in self.stages.executors.values():
            aliases = executor.stage.ties.aliases
            for index, layer in executor.stage.numbered():
                for name, p in layer.named_parameters():
                    yield self.layered.own_name(index, name), aliases.get(p, p)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers by the model's names, validated."""
        self.synchronize()
        for index, layer in self.stages.layers():
            for name, buffer in layer.named_buffers():
                yield self.layered.own_name(index, name), buffer

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank; they must be picklable."""
        return self.stages.transport.gather(value)

    # State.

    def synchronize(self) -> None:
        """Wait for the decision on the last step; parameters and state are then right.

        Looking at parameters or optimizer state between steps needs it, unless by this
        object's methods or a ``state_dict``. One rank may call it alone.

        Raises:
            PeerError: another stage died or did not answer.
            NonFiniteError: too many steps in a row were skipped.
        """
        self.stages.synchronize()

    def average(self, policy: Periodic, replicas: DeviceMesh) -> None:
        """Average parameters with those of other pipelines, every few steps.

        All processes of all pipelines must call, before `load`. The pipelines begin
        with the parameters and buffers of the first one.

        Args:
            policy: a `zbpp.averaging.Periodic` or `zbpp.averaging.DiLoCo`.
            replicas: a dimension of a mesh, such as ``mesh["dp"]``. The pipeline's is
                another: ``zbpp.Pipeline(..., mesh=mesh["pp"])``.
        """
        self._checkpoints.averager = Averager(policy, replicas, self.stages)

    def attach(self, *schedulers: Any) -> None:
        """Save and load the state of LR schedulers of `optimizers`, too.

        The script still steps them.

        Raises:
            RequestError: an optimizer of a scheduler is not of this pipeline, or
                optimizers of some stages only have schedulers.
        """
        self._checkpoints.attach(schedulers)

    def state_dict(self) -> State:
        """The validated state of this process's stages, by the model's names.

        Parameters, persistent buffers, optimizers, attached schedulers, loss scale,
        number of steps, and the state of post-validation. Tensors are not copied. With
        one stage per process it is a part of the model's state: `save` writes all.
        """
        return self._checkpoints.state_dict(self.n_steps)

    def load_state_dict(self, state: State, *, model_only: bool = False) -> None:
        """Go on from a state (every rank must call).

        Args:
            state: of `state_dict`, of this split or any other; entries of other ranks
                may be in it.
            model_only: load parameters and buffers, and leave all else as it is.

        Raises:
            RequestError: something is missing, unknown or of another shape; it is
                named, and nothing is changed.
        """
        self._refuse_between_parts()
        self._checkpoints.load_state_dict(state, model_only=model_only)
        if not model_only:
            self.n_steps = int(state["step"])

    def save(
        self,
        folder: str | Path,
        *,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
        wait: bool = False,
        trainable_only: bool = False,
    ) -> None:
        """Save a checkpoint while the run continues (every rank must call).

        The call waits for the decision on the last step and for a copy of the state;
        files are written in the background, into ``folder/step-<steps done>``, which
        is there when all of it is on the disk, or not at all. A save before that has
        not ended is waited for; if it failed, that is logged.

        Args:
            folder: of this run's checkpoints; all ranks see the same.
            keep: checkpoints that stay, the newest; None: all.
            extra: numbers, texts, tensors and containers of them, which `load` returns:
                the place in the data, for instance. Rank 0's counts.
            wait: return when it is on the disk.
            trainable_only: leave out frozen parameters, their optimizer state, and all
                buffers. The checkpoint, of a LoRA for instance, is loaded into a model
                that has them already.

        Raises:
            CheckpointError: the folder cannot be written; with ``wait``, or it failed.
            RequestError: part of the state is of a type that no checkpoint can store.
        """
        self._checkpoints.save(
            folder,
            n_steps=self.n_steps,
            about={
                "mode": self.schedule.name,
                "n_stages": self.schedule.n_stages,
                "n_microbatches": self.schedule.n_microbatches,
                "split": [len(layers) for layers in self.split],
            },
            keep=keep,
            extra=extra or {},
            trainable_only=trainable_only,
        )
        if wait:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait until the last save is on the disk (every rank must call).

        Raises:
            CheckpointError: it failed; the checkpoints before it are as they were.
        """
        self._checkpoints.finish_saving()

    def load(
        self, path: str | Path, *, model_only: bool = False, missing_ok: bool = False
    ) -> dict[str, Any]:
        """Go on from a checkpoint (every rank must call).

        Args:
            path: of a checkpoint, or the folder of several: then the newest one that
                is not damaged is loaded, and damaged ones are logged.
            model_only: load parameters and buffers, and leave all else as it is.
            missing_ok: change nothing if there is no checkpoint yet, as at the first
                start of a job that resumes.

        Returns:
            The ``extra`` of `save`; an empty dict if nothing was loaded.

        Raises:
            CheckpointError: there is none; or names the damaged files.
            RequestError: it does not fit this model; nothing is changed.
        """
        self._refuse_between_parts()
        state = self._checkpoints.load(
            path, model_only=model_only, missing_ok=missing_ok
        )
        if state and not model_only:
            self.n_steps = int(state["step"])
        return dict(state.get("extra", {}))

    def close(self) -> None:
        """Synchronize, finish the last save, and end; also at the end of a ``with``."""
        self._checkpoints.end()
        self.stages.close()

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self.stages.executors))
        return (
            f"<zbpp.Pipeline: {self.schedule.name}, {self.n_layers} layers, "
            f"{self.schedule.n_stages} stages (here {stages}), "
            f"{self.n_microbatches} micro-batches, {self.n_steps} steps done>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.close()
        else:
            self.stages.transport.doing = "code outside of steps"
            self.stages.transport.report(error)
