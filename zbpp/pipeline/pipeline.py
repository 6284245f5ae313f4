"""The API in a user's script: one object, one call a step.

    pipeline = zbpp.Pipeline(model, loss_fn=loss_fn, optimizer=make_optimizer,
                             schedule="ZBH1", n_microbatches=16, clip_grad_norm=1.0)
    for inputs, targets in loader:
        result = pipeline.step(inputs, targets)

This file wires the layers together: mode -> schedule -> programs -> executors.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zbpp.core import Costs, MemoryModel, Schedule, schedule_text
from zbpp.core.sharding import Shard
from zbpp.models import layered_of
from zbpp.models.given import Given, model_to_build
from zbpp.pipeline.absent import AbsentNames
from zbpp.pipeline.arguments import (
    check_arguments,
    check_first_step,
    checked_device,
    warn_of_plan,
)
from zbpp.pipeline.evaluate import Evaluating
from zbpp.pipeline.given import loss_of, measure_example
from zbpp.pipeline.parallel import with_collectives
from zbpp.pipeline.reports import Reports
from zbpp.pipeline.state import Checkpoints
from zbpp.pipeline.stepping import Stepping
from zbpp.pipeline.switch import Switching
from zbpp.planning import Plan, PlanRequest, is_auto
from zbpp.planning.answer import recomputed_layers
from zbpp.planning.pipelines import (
    LayersOf,
    choose_validation,
    costs_or_layers,
    plan_pipeline,
)
from zbpp.runtime.comm.process_group import initialise, own_device
from zbpp.runtime.compiled.layers import Compiling
from zbpp.runtime.driver import collective_calls as calls
from zbpp.runtime.driver.agreement import check_agreement
from zbpp.runtime.driver.batches import Batches
from zbpp.runtime.driver.build import StageOptions, build_executors, make_transports
from zbpp.runtime.driver.compile_chunks import check_compile
from zbpp.runtime.driver.lifecycle import Lifecycle
from zbpp.runtime.driver.state_access import settle_before_access
from zbpp.runtime.microbatches import Batch, Weigh, WeighName
from zbpp.runtime.optim.loss_scale import LossScaler
from zbpp.runtime.optim.make import MakeOptimizer, check_optimizer
from zbpp.runtime.optim.patience import Patience
from zbpp.runtime.optim.step_state import RollbackMethod, step_rules
from zbpp.runtime.parallel.mesh import find_place
from zbpp.runtime.parallel.wrap import check_shard
from zbpp.runtime.partition import partition_layers
from zbpp.runtime.stage import LossFn
from zbpp.runtime.ties.plan import Tie, TiePlan, check_ties
from zbpp.schedules import Recomputing, Split, lower
from zbpp.tuning.watch import Watch, make_watcher

__all__ = ["Pipeline"]


class Pipeline(Stepping, Checkpoints, Switching, Evaluating, Reports, AbsentNames):
    """A model cut into stages, trained by a schedule.

    Under torch.distributed (``torchrun`` is enough) this process is one stage; else
    all stages live in this process. Losses, gradients and parameters are the same.

    Args:
        model: an `nn.Sequential`, a list of layers, a builder that is called with the
            ranges of layer indices of this process only, a model of transformers, or
            what `zbpp.cut` returns.
        loss_fn: ``loss_fn(outputs, targets)``, the mean over one micro-batch; None: the
            model's own.
        optimizer: called with each stage's parameters, also frozen ones, or with pairs
            of name and parameter if its argument is called ``named_parameters``; gives
            one, or a list, which may be empty. None leaves gradients, of the mean loss
            of the batch, to the caller.
        schedule: a mode such as ``"ZBH1"``, a schedule or plan file, a `Schedule`, or a
            `Plan`.
        n_microbatches: micro-batches in a step; None: the schedule's.
        weigh: what the loss of the batch is a mean over: ``"samples"``; ``"tokens"``,
            the targets (or ``targets["labels"]``) that are not -100; or a function
            that counts the targets of a micro-batch. None: the model's, else samples.
        n_stages: number of stages; None: the schedule's, or one per process.
        n_layers: number of layers, if the model is a builder.
        ties: parameters that layers share: ``((layer, name), ...)``; found in a list.
        split: layers of each chunk, or ``"even"``: the first chunks get one more, or
            ``"balanced"``: by the costs in ``layers``. None: the schedule's; if it has
            none, balanced with ``layers``, else even.
        layers: costs of the layers to plan for, or a file of them, in place of costs.
        example: inputs and targets of a step, on every rank: layers are then measured,
            and their memory is estimated, before they are dealt to stages.
        recompute: layers that B computes again, to hold less: ``"auto"`` (by costs with
            m_r, and a limit), ``"all"``, ``"none"``, numbers. None: the schedule's.
        clip_grad_norm: largest norm of all gradients of all stages; None: any.
        post_validation: step without waiting for the other stages' gradient norms, and
            roll the step back in the next one if they ask for it; None: where the
            schedule splits the backward or has V's. The results are the same.
        rollback: how a step is rolled back: ``"deferred"``, with a copy of parameters
            and a second step; ``"snapshot"``, with one of the optimizer state as well;
            ``"compiled"``: deferred, parameters first and alone, by a compiled kernel
            (fused Adam, AdamW); ``"auto"``: that on CPUs, from 2**25 parameters on.
        patience: when steps become speculative, or give way to a barrier again.
        max_consecutive_skips: with an Inf or NaN gradient, before the run ends.
        loss_scale: of fp16 gradients: a number, or a `LossScaler`.
        costs: times to plan for.
        memory: likewise; a text as ``"16GiB"``, or a number, is the limit of a stage.
        watch: when to plan again from what steps take, with the same results; None or
            True: for ``"auto"``, after the first steps and when costs drift; False: no.
        device: where the layers live; ``"cuda"``: this process's GPU; None: that, or
            the CPU where there is none.
        autocast: compute dtype of the forward, for instance ``torch.bfloat16``.
        compile: compile each layer by itself, ``"blocks"``, or whole ``"chunks"``,
            but for layers that are seeded, recomputed or tied; see docs/compile.md.
        seed: seeds dropout by step, layer and micro-batch, alike in all modes.
        first_step: number of the first step, for dropout; `load` sets it too.
        exact_sums: add gradients in micro-batch order, rounded as ``loss.backward()``
            does; then all modes agree to the last bit. False adds them as they come,
            within the matrix products: a few per cent faster, with less memory.
        stage_streams: stages of this process, on one GPU, compute side by side.
        cuda_graphs: record passes on a GPU, and replay them; see docs/gpus.md.
        group: processes of the pipeline, by stage; None: all.
        mesh: of stages, data and tensor parallelism; see `zbpp.mesh`. Each replica is
            given its own share of the batch. Layers may be wrapped by `fully_shard` or
            `replicate`; those that are not are replicated, or wrapped by ``shard``.
        shard: what replicas hold in parts: ``"optimizer"`` state, ``"gradients"`` too,
            or ``"parameters"`` as well; ``"none"``: each holds all.
        alternating_buffers: for ``shard="parameters"``; see docs/data_parallel.md.
        timeout_s: how long a stage waits for another before it gives up; longer than
            whatever one rank alone may have to do: compile, evaluate, load.
        first_timeout_s: the same at the start and in the first step; None: timeout_s.

    Raises:
        RequestError: the model, the schedule and the stages do not fit together.
    """

    def __init__(
        self,
        model: Given,
        *,
        loss_fn: LossFn | None = None,
        optimizer: MakeOptimizer | None,
        schedule: str | Path | Schedule | Plan = "ZBH1",
        n_microbatches: int | None = None,
        weigh: WeighName | Weigh | None = None,
        n_stages: int | None = None,
        n_layers: int | None = None,
        ties: Sequence[Tie] | None = None,
        split: Split = None,
        layers: LayersOf | None = None,
        example: tuple[Batch, Batch] | None = None,
        recompute: Recomputing | None = None,
        clip_grad_norm: float | None = None,
        post_validation: bool | None = None,
        rollback: RollbackMethod = "auto",
        patience: Patience | None = None,
        max_consecutive_skips: int | None = 5,
        loss_scale: LossScaler | float | None = None,
        costs: Costs | None = None,
        memory: MemoryModel | str | float | None = None,
        watch: Watch | bool | None = None,
        device: torch.device | str | None = None,
        autocast: torch.dtype | None = None,
        compile: Compiling = False,
        seed: int | None = None,
        first_step: int = 0,
        exact_sums: bool = True,
        stage_streams: bool = False,
        cuda_graphs: bool = False,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        shard: Shard = "none",
        alternating_buffers: bool = False,
        timeout_s: float = 600.0,
        first_timeout_s: float | None = None,
    ) -> None:
        check_optimizer(optimizer)
        check_arguments(
            loss_fn=loss_fn,
            counts={
                "n_microbatches": n_microbatches,
                "n_stages": n_stages,
                "n_layers": n_layers,
                "max_consecutive_skips": max_consecutive_skips,
            },
            times_s={"timeout_s": timeout_s, "first_timeout_s": first_timeout_s},
            schedule=schedule,
            clip_grad_norm=clip_grad_norm,
            autocast=autocast,
            loss_scale=loss_scale,
            seed=seed,
        )
        first_timeout_s = first_timeout_s or timeout_s
        self.device = own_device(None if device is None else checked_device(device))
        initialise(self.device, timeout_s=first_timeout_s)
        self.place = place = find_place(mesh, group, n_stages=n_stages)
        self.rank, self.n_ranks = place.rank, place.n_ranks
        check_shard(shard, place, alternating=alternating_buffers)
        self.layered = layered_of(model, n_layers)
        self.n_layers = self.layered.n_layers
        loss_fn = loss_of(self.layered, loss_fn)
        if example is not None and layers is None:
            layers = measure_example(
                partial(
                    type(self),
                    n_microbatches=n_microbatches,
                    weigh=weigh,
                    n_stages=n_stages,
                    seed=seed,
                    group=group,
                    mesh=mesh,
                    ties=ties,
                    timeout_s=timeout_s,
                    first_timeout_s=first_timeout_s,
                ),
                *(model, self.layered, example),
                device=self.device,
                post_validation=post_validation,
                compile=compile,
                loss_fn=loss_fn,
                optimizer=optimizer,
                rollback=rollback,
                autocast=autocast,
                exact_sums=exact_sums,
            )
        request = PlanRequest(
            schedule=schedule,
            n_stages=n_stages,
            n_microbatches=n_microbatches,
            costs=costs_or_layers(costs, layers),
            memory=memory,
            split=split,
            recompute=recompute,
        )
        self.chosen = plan = plan_pipeline(
            request, n_layers=self.n_layers, n_ranks=place.n_stages
        )
        self.schedule = choose_validation(
            plan.schedule, post_validation, steps=optimizer is not None
        )
        warn_of_plan(self.schedule, schedule, n_stages=n_stages, n_ranks=place.n_ranks)
        rules = step_rules(
            clip_grad_norm=clip_grad_norm,
            post_validation=self.schedule.is_post_validated,
            patience=patience,
            rollback=rollback,
            loss_scale=loss_scale,
            max_consecutive_skips=max_consecutive_skips if optimizer else None,
        )
        placement = self.schedule.placement
        self.split = partition_layers(self.n_layers, placement.n_chunks, plan.split)
        shared = check_ties({*self.layered.ties, *(ties or ())}, self.n_layers)
        own_name = self.layered.own_name
        self._ties = TiePlan(shared, self.split, placement, own_name)
        self._programs = lower(self.schedule, ties=self._ties.chunks)
        transports = make_transports(
            *(self._programs, place, self.device),
            timeouts_s=(timeout_s, first_timeout_s),
        )
        self._options = options = StageOptions(
            loss_fn=loss_fn,
            optimizer=optimizer,
            own_name=own_name,
            rules=rules,
            device=self.device,
            autocast=autocast,
            seed=seed,
            exact_sums=exact_sums,
            recompute=recomputed_layers(self.schedule, list(map(len, self.split))),
            stage_streams=stage_streams,
            cuda_graphs=cuda_graphs,
            compile=check_compile(compile),
            shard=shard,
            alternating_buffers=alternating_buffers,
        )
        self._executors = build_executors(
            model_to_build(model, self.layered),
            *(self._ties, transports, options, place),
            knows_ties=ties is not None or self.layered.build is not model,
        )
        self.schedule, self._programs = with_collectives(
            self.schedule,
            self._executors,
            place,
            shard,
            ties=self._ties.chunks,
            costs=plan.known_costs,
        )
        self._n_steps = check_first_step(first_step)
        self._batches = Batches(
            *(self._executors, placement, self.layered.cut_batch),
            weigh=weigh or self.layered.weigh,
        )
        self._lifecycle = Lifecycle(self._executors.values())
        finalizer = weakref.finalize(self, self._lifecycle.let_go)
        finalizer.atexit = False  # then transports wait a little for the others
        self._lifecycle.hooks = settle_before_access(
            (layer for _, layer in self._layers()),
            *(self.optimizers, self._lifecycle.synchronize),
        )
        self._watcher = make_watcher(
            *(watch, is_auto(schedule), self.schedule, plan.costs),
            has_costs=plan.has_costs,
        )
        self.memory = plan.costs
        asked = (schedule_text(self.schedule), self.split, rules, autocast, compile)
        all_asked = (*asked, seed, first_step, exact_sums)
        check_agreement(self._executors, all_asked, self._ties)

    def synchronize(self) -> None:
        """Wait for the decision on the last step; parameters and state are then right.

        Looking at parameters or optimizer state between steps needs it, unless by this
        object's methods or a ``state_dict``. One rank may call it alone.

        Raises:
            PeerError: another stage died or did not answer.
            NonFiniteError: too many steps in a row were skipped.
        """
        self._lifecycle.synchronize()

    def close(self) -> None:
        """Synchronize, finish the last save, and end; also at the end of a ``with``."""
        self._end_saving()
        self._lifecycle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.close()
        else:
            calls.tell_failure(self._executors, error, doing="code outside of steps")
