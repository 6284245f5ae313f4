"""Mistakes put into zbpp, one at a time: does a test of the room see each of them?

    make mutants ARGS="[--room core] [--results new.json]"

Each mutant is a mistake that somebody may make: one text of one file, changed in a copy
of the tree. The tests of its room run until the first one fails. Room "simgpu" has
those that only a simulated GPU shows: waits for streams are left out (`without_waits`).
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LATE_S = 900.0  # a mutant that hangs ends here, and counts as caught
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py\S*)", re.MULTILINE)

TESTS = {
    "core": "tests/core tests/files tests/simulator/test_times.py tests/plans",
    "simulator": "tests/simulator",
    "schedules": "tests/plans",
    "planning": "tests/plans tests/cli",
    "tuning": "tests/tuning",
    "comm": "tests/comm tests/failures tests/bits/test_processes.py",
    "parallel": "tests/failures/test_starts.py tests/bits/test_meshes.py "
    "tests/bits/test_mesh_work.py tests/bits/test_averaging.py "
    "tests/bits/test_reductions.py",
    "driver": "tests/bits/test_batches.py tests/failures "
    "tests/comm tests/state tests/bits/test_one_process.py",
    "backward": "tests/split",
    "compiled": "tests/split/test_compiled.py",
    "support": "tests/bits/test_meshes.py",
    "optim": "tests/state",
    "ties": "tests/state/test_ties.py tests/state tests/bits",
    "executor": "tests/bits tests/state",
    "pipeline": "tests/test_user_mistakes.py tests/bits/test_refusals.py "
    "tests/bits/test_batches.py "
    "tests/checkpoint",
    "memory": "tests/memory tests/cli/test_models.py",
    "profiling": "tests/profiling",
    "models": "tests/models",
    "checkpoint": "tests/checkpoint tests/files",
    "emulation": "tests/emulation",
    "training": "tests/training tests/failures/test_faults.py",
    "cli": "tests/cli",
    "bench": "tests/bench",
    "simgpu": "tests/simgpu/test_scenarios.py",
}
"""Tests for the mutants of a room."""

SIMULATED = "tests/simgpu/everywhere", "tests"
"""Paths on which Python finds the simulated GPU first."""

EXAMPLES = "tests/repo/test_doctests.py"
"""Of every room: it runs what docstrings show."""

SLOW = {"parallel", "support", "models", "bench", "comm", "cli", "training"}
"""Rooms in which some mistakes show only in tests that are slow."""


class Mutant(NamedTuple):
    """One change; ``old`` stands in the file once."""

    room: str
    name: str
    file: str
    old: str
    new: str


# fmt: off
TABLE = (
    # ---- core
    ("core", "a message takes no time", "zbpp/core/graph.py",
     "arrival = ends[source] + delay", "arrival = ends[source]"),
    ("core", "a gradient takes the wrong hop", "zbpp/core/graph.py",
     "times.delay(read.chunk, chunk)", "times.delay(read.chunk - 1, chunk)"),
    ("core", "passes in parts begin in any order", "zbpp/core/graph.py",
     'elif "begun" in last:', 'elif "nothing" in last:'),
    ("core", "a part of W waits for more of its B", "zbpp/core/graph.py",
     "last.get((b, self.times.source_of(job)), self.missing)",
     "last.get(b, self.missing)"),
    ("planning", "a stage may hold twice its limit", "schedules/planner/problem.py",
     "if need > limit * (1 + ROUNDING)", "if need > 2 * limit"),
    ("core", "a W may be missing", "zbpp/core/schedule.py",
     "if work.count(_ALL_DONE) < n_microbatches", "if work.count(0)"),
    ("core", "a pass may come twice", "zbpp/core/schedule.py",
     "elif work[i] != before", "elif work[i] < before"),
    ("core", "no stage waits for another", "zbpp/core/schedule.py",
     "if read is not None and not read[job.microbatch]:", "if read == 0:"),
    ("core", "KiB are kB", "zbpp/core/columns.py",
     '"kib": 2**10', '"kib": 10**3'),
    ("core", "cuts are one layer late", "zbpp/core/layers.py",
     "cuts = [chunk[-1] for chunk in chunks[:-1]]",
     "cuts = [chunk[0] for chunk in chunks[1:]]"),
    ("core", "a stage of twice the speed takes twice as long",
     "zbpp/core/costs.py",
     "of(name) / speed[stage_of] for", "of(name) * speed[stage_of] for"),
    ("core", "parts that compute in a row stay apart", "zbpp/core/parts.py",
     "if lane is Lane.COMPUTE and joined and", "if lane is None and joined and"),
    ("core", "a number of a file may be a truth", "zbpp/core/files.py",
     "if isinstance(value, bool) and form is not bool", "if value is None and form"),
    ("core", "the hop of the chunk that sends", "zbpp/core/costs.py",
     "self.hops[source if source < target else target]",
     "self.hops[source % len(self.hops)]"),
    ("core", "the bound of rounds forgets the wait", "zbpp/core/bounds.py",
     "wait = full + forwards", "wait = 2 * full + forwards"),
    ("core", "the bound forgets a ramp", "zbpp/core/bounds.py",
     "return max(stage.work + max(idle), longest + stage.around)",
     "return stage.work + max(idle)"),
    ("core", "the mark is under another job", "zbpp/core/text.py",
     "len(head) + (mark[1] - first) * (width + 1)",
     "len(head) + mark[1] * (width + 1)"),
    ("core", "B gives its activations back twice", "zbpp/core/jobs.py",
     'keeps=(("m_w", 1), ("m_b", -1))', 'keeps=(("m_b", -1),)'),
    # ---- simulator
    ("simulator", "bubble of the idlest stage", "simulator/metrics.py",
     "_above_zero(longest - max(work(timeline)), longest)",
     "_above_zero(longest - min(work(timeline)), longest)"),
    ("simulator", "the path follows the input that came first",
     "zbpp/core/graph.py",
     "if end + wait.delay > last:", "if latest is None or end < last:"),
    ("simulator", "norms are summed in no time", "zbpp/core/graph.py",
     "ends[self.all_gradients] = last + reduction", "ends[self.all_gradients] = last"),
    ("simulator", "a slow drift is the end", "simulator/engine.py",
     "_SAME = 1e-9", "_SAME = 1e-2"),
    ("simulator", "collectives on the thread of jobs", "simulator/trace.py",
     "thread, duration = box.lane * n_stages + box.stage,",
     "thread, duration = box.stage,"),
    ("simulator", "an arrow ends at a later part", "simulator/trace.py",
     "or slot.job.index == 0", "or slot.job.index"),
    ("simulator", "boxes of a page begin together", "simulator/page.py",
     "gaps.append(round(box.start / unit) - end)",
     "gaps.append(round(box.start / unit))"),
    ("simulator", "a job of no time is a line", "simulator/plot.py",
     "_AT_ONCE * length * x.style.at_once", "_AT_ONCE * length"),
    # ---- schedules
    ("schedules", "ZB-H2 starts one F fewer", "schedules/patterns/one_chunk.py",
     "- (arms - 1)", "- 2 * (arms - 1)"),
    ("schedules", "VPP rounds groups up", "schedules/patterns/interleaved.py",
     "max(1, n_microbatches // p)", "-(-n_microbatches // p)"),
    ("schedules", "a late message is awaited before V", "schedules/passes/lower.py",
     "max(column, check + 1)", "max(column, check)"),
    ("schedules", "parameters are gathered one pass late",
     "schedules/passes/collectives.py",
     "passes[number - 1] if number", "passes[number] if number"),
    ("schedules", "receives are posted with their reader",
     "schedules/passes/lower.py",
     "bisect_right(places[stage], need) - 1 - ahead",
     "bisect_right(places[stage], need) - 1"),
    ("schedules", "one micro-batch more in flight",
     "schedules/planner/compiled/list_scheduler.c",
     "started[q] - started[mine[n - 1]] >= settings->max_in_flight[s]",
     "started[q] - started[mine[n - 1]] > settings->max_in_flight[s]"),
    ("schedules", "a limit raises the memory of a mode", "schedules/planner/problem.py",
     "min(memory_cap, default_limit)", "max(memory_cap, default_limit)"),
    ("schedules", "the bound of a split is too high",
     "schedules/planner/balance.py",
     "sum(each[: fewest - 1])", "sum(each[: fewest + 1])"),
    ("schedules", "layers to recompute by memory alone",
     "zbpp/planning/layers.py",
     "return saved / f[layer] if f[layer] > 0 else math.inf", "return saved"),
    ("planning", "most messages win", "zbpp/planning/candidates.py",
     "fewest = min(map(_n_messages", "fewest = max(map(_n_messages"),
    ("schedules", "a budget of passes or seconds", "schedules/planner/problem.py",
     "self.spent < self.passes and self.seconds_left > 0",
     "self.spent < self.passes or self.seconds_left > 0"),
    # ---- planning
    ("planning", "tensor parallelism that does not divide", "zbpp/planning/meshes.py",
     "if n < 1 or n_devices % n", "if n < 1"),
    ("planning", "ZB-H2 promises one more", "zbpp/planning/modes.py",
     "promise=lambda p: 2 * p - 1", "promise=lambda p: 2 * p"),
    ("planning", "a file of another size", "zbpp/planning/make.py",
     "if wanted is not None and wanted != actual",
     "if wanted is not None and wanted < actual"),
    ("planning", "whole tensors are in both copies", "zbpp/planning/replicas.py",
     "(both - (whole == 2) * size) / n + whole * size", "both / n + whole * size"),
    ("planning", "post-validation on one stage", "zbpp/planning/make.py",
     "steps and schedule.n_stages > 1 and asked", "steps and asked"),
    ("planning", "the baseline is trusted alone", "zbpp/planning/candidates.py",
     "joint.step * (1 - _LITTLE) <= best.step", "joint.step <= best.step"),
    ("planning", "all are V", "zbpp/planning/candidates.py",
     'if placement.stage_of[-1] == 0 else', 'if placement.stage_of[0] == 0 else'),
    ("planning", "gain over the new step", "zbpp/planning/answer.py",
     "1 - self.step / self.even_step", "self.even_step / self.step - 1"),
    # ---- tuning
    ("tuning", "later windows have no end", "zbpp/tuning.py",
     "later % self.every == 0", "later == self.every"),
    ("tuning", "any gain is enough", "zbpp/tuning.py",
     "if answer.gain < self._watch.least_gain:",
     "if answer.gain < -1.0:"),
    # ---- comm
    ("comm", "values of another look are sent", "zbpp/runtime/comm/shapes.py",
     "        if spec == known:", "        if known:"),
    ("comm", "evaluation has the tags of training", "zbpp/runtime/comm/links.py",
     "self._tag = int(not training)", "self._tag = 0"),
    ("comm", "an input without influence gets ones", "zbpp/runtime/values.py",
     "torch.zeros_like(x) if dx is None", "torch.ones_like(x) if dx is None"),
    ("comm", "a tensor that is there twice travels twice", "zbpp/runtime/values.py",
     "places.setdefault(id(leaf), len(tensors))", "len(tensors)"),
    ("comm", "tensors of a value in another order", "zbpp/runtime/comm/mailbox.py",
     "peer) for buffer in buffers]", "peer) for buffer in buffers[::-1]]"),
    ("comm", "the last failure is the cause", "zbpp/runtime/comm/failures.py",
     'self._store.compare_set(_CAUSE, "", cause)',
     "(self._store.set(_CAUSE, cause), cause.encode())[1]"),
    ("comm", "a sum of the first stage alone", "zbpp/runtime/comm/transport.py",
     "return len(self.vectors) == self._n_stages", "return len(self.vectors) >= 1"),
    ("comm", "an error in the validation of a save is not reported",
     "zbpp/runtime/driver/stages.py",
     "with self.reporting():\n            for", "if True:\n            for"),
    # ---- parallel
    ("parallel", "sharded norms count once", "zbpp/runtime/comm/place.py",
     "if dim not in dims", "if dim in dims"),
    ("parallel", "a layer is ready with its first parameter",
     "zbpp/runtime/parallel/sums.py",
     "Counter(self._layer_of[leaf] for leaf in leaves)",
     "Counter({self._layer_of[leaf] for leaf in leaves})"),
    ("parallel", "all layers have one buffer", "zbpp/runtime/parallel/buffers.py",
     "turn = next(self._turns)", "turn = 0"),
    ("parallel", "a layer that is gathered in vain is there",
     "zbpp/runtime/parallel/buffers.py",
     "if before is not None and before.pending:", "if False:"),
    ("parallel", "W reads a buffer that others have had",
     "zbpp/runtime/backward/split.py",
     "x.clone() if is_lent else x", "x"),
    ("parallel", "sums of layers wait for the end of W",
     "zbpp/runtime/parallel/sums.py",
     "[self._layer_of[leaf]] -= 1\n        self._go_on()",
     "[self._layer_of[leaf]] -= 1"),
    ("parallel", "experts are summed over ep", "zbpp/runtime/parallel/experts.py",
     "return (sharded.device_mesh.mesh_dim_names or ()) if is_sharded(p) else ()",
     "return ()"),
    ("parallel", "slices are not summed", "zbpp/runtime/comm/place.py",
     "(*REPLICA_DIMS, CONTEXT_DIM, EXPERT_DIM)", "(*REPLICA_DIMS, EXPERT_DIM)"),
    ("parallel", "norms count experts of one process", "zbpp/runtime/optim/norms.py",
     "owns(part.names)", "owns(())"),
    ("parallel", "replicas sum other parts of a gradient",
     "zbpp/runtime/parallel/sums.py",
     "place_gradients(self._parameters)", "pass"),
    ("parallel", "replicas get different missing gradients",
     "zbpp/runtime/parallel/sums.py",
     "p.grad = torch.zeros_like(p, requires_grad=False)",
     "p.grad = torch.ones_like(p, requires_grad=False)"),
    ("parallel", "nodes do not exchange their sums",
     "zbpp/runtime/parallel/reductions.py",
     "_wait(dist.all_reduce(part, group=between, async_op=True))", "pass"),
    ("parallel", "a residual forgets the step before",
     "zbpp/runtime/parallel/reductions.py",
     "flat += torch.cat(", "flat += 0 * torch.cat("),
    ("parallel", "a skipped step changes the residuals",
     "zbpp/runtime/parallel/reductions.py", "if not skipped:", "if True:"),
    ("parallel", "residuals are not loaded", "zbpp/checkpoint/state.py",
     "loading.pairs.append((value, here))", "pass"),
    ("parallel", "residuals of a run before a load", "zbpp/checkpoint/state.py",
     "loading.before.append(shard_of(here).numbers.zero_)", "pass"),
    ("parallel", "replicas begin as they were built",
     "zbpp/runtime/parallel/broadcast.py", "part.copy_(after)", "pass"),
    ("parallel", "buffers of slices become those of the first",
     "zbpp/runtime/parallel/broadcast.py", "if dim in REPLICA_DIMS:", "if True:"),
    # ---- driver
    ("driver", "all chunks begin alike", "zbpp/runtime/driver/build.py",
     "(seed + layers.start) % 2**63", "seed % 2**63"),
    ("driver", "each rank has layers of its own", "zbpp/runtime/driver/agreement.py",
     "if digest != expected", "if False"),
    ("driver", "the batches differ a little", "zbpp/runtime/optim/same_samples.py",
     "differs[:, _INPUTS] & differs[:, _TARGETS]",
     "differs[:, _INPUTS] | differs[:, _TARGETS]"),
    ("driver", "means of means", "zbpp/runtime/driver/stages.py",
     "float((losses * weights).sum() / (1 if adds else weights.sum()))",
     "float(losses.mean())"),
    ("driver", "outputs in the order of their ends", "zbpp/runtime/driver/stages.py",
     "for i in sorted(by_number)",
     "for i in sorted(by_number, reverse=True)"),
    ("driver", "parts of a step weigh as a whole", "zbpp/runtime/driver/batches.py",
     "return weight * self.n_calls", "return weight"),
    # ---- backward
    ("backward", "grad is somebody else's memory", "zbpp/runtime/backward/split.py",
     "        run_backward([*others], [*others.values()])",
     "        for p, dw in others.items():\n            p.grad = dw"),
    ("backward", "one early sum waits on", "zbpp/runtime/backward/order.py",
     "while (action :=", "if (action :="),
    ("backward", "alpha is forgotten", "zbpp/runtime/backward/products.py",
     "return gradient if alpha == 1 else gradient * alpha.conjugate()",
     "return gradient"),
    ("backward", "operands may change before W", "zbpp/runtime/backward/split.py",
     "if _versions(tensors) != versions", "if not tensors"),
    ("backward", "a weight that has another use", "zbpp/runtime/backward/plan.py",
     "if slot not in slots", "if False"),
    ("backward", "a weight that is used as it is and transposed",
     "zbpp/runtime/backward/plan.py",
     "if len(set(is_view)) > 1:", "if False:"),
    ("backward", "uses of a weight change places", "zbpp/runtime/backward/plan.py",
     "sites.sort(key=_turn_of)  # it may", "pass  # it may"),
    ("backward", "gradients of a leaf in two calls", "zbpp/runtime/backward/split.py",
     "if sum([gradient.nbytes for _, gradient in sums]) >= _TOGETHER_BYTES:\n"
     "                    left = [leaf for work in self.work for leaf in "
     "work.product.leaves]\n",
     "if sums:\n                    left = []\n"),
    ("backward", "hooks of a forward are not seen", "zbpp/runtime/backward/split.py",
     "queue.n_hooks == hooks_made()", "queue.n_hooks == queue.n_hooks"),
    ("backward", "a plan for other leaves", "zbpp/runtime/backward/plan.py",
     "places.get(id(leaf), node)",
     "places.get(id(leaf), node.__class__)"),
    ("backward", "a hook behind the sum is not seen", "zbpp/runtime/backward/split.py",
     "leaf._backward_hooks or leaf._post_accumulate_grad_hooks",
     "leaf._backward_hooks"),
    ("executor", "recomputed forwards with other numbers",
     "zbpp/runtime/recompute.py",
     "self._random.again(seed)", "self._random.again(seed + 1)"),
    # ---- compiled
    ("compiled", "a result that is returned twice", "zbpp/runtime/compiled/backend.py",
     "if not body or results.count(results[slot]) > 1", "if not body"),
    ("compiled", "all pieces are computed in B", "zbpp/runtime/compiled/backend.py",
     'getattr(current_node(), "zbpp_waiting", None) or {}', "{}"),
    # ---- support
    ("support", "frozen parameters have gradients", "zbpp/runtime/support/fsdp.py",
     "if there or not parameter.sharded_param.requires_grad", "if there"),
    ("parallel", "an average before the decision", "zbpp/averaging.py",
     "        self._stages.synchronize()\n", ""),
    ("parallel", "different steps are averaged", "zbpp/averaging.py",
     "                self._check(n_steps)\n", ""),
    ("parallel", "the last average is that of the start", "zbpp/averaging.py",
     '        outer.state[p]["average"].copy_(p)\n', ""),
    ("parallel", "DiLoCo forgets the last average", "zbpp/averaging.py",
     "outer.state[p].setdefault(\"average\", p.detach().clone())",
     "p.detach().clone()"),
    # ---- optim
    ("optim", "small gradients are made larger", "zbpp/runtime/optim/decision.py",
     "min(1.0, self._max_norm / (norm + 1e-6))",
     "self._max_norm / (norm + 1e-6)"),
    ("optim", "a norm of one shard", "zbpp/runtime/optim/optimizers.py",
     "with WholeSums() if has_shards else nullcontext():",
     "with nullcontext():"),
    ("optim", "options of now for a step of then", "zbpp/runtime/optim/optimizers.py",
     "            group.update(before)\n", ""),
    ("optim", "the caller's options are lost", "zbpp/runtime/optim/optimizers.py",
     "if not _same(ours[name], after.get(name))", "if False"),
    ("optim", "writes before the validation pass",
     "zbpp/runtime/optim/stage_optimizer.py",
     "{p for p, at in marks if _mark(p) != at}", "set[Tensor]()"),
    ("optim", "the loss scale grows one step late", "zbpp/runtime/policies.py",
     "if self._good_steps == self._growth_interval",
     "if self._good_steps > self._growth_interval"),
    ("optim", "a snapshot without its copy", "zbpp/runtime/optim/rollback.py",
     "p: p.clone()", "p: p.detach()"),
    ("optim", "one valid step more", "zbpp/runtime/optim/step_state.py",
     "self._n_valid >= _VALID_STEPS", "self._n_valid > _VALID_STEPS"),
    ("optim", "one skip more", "zbpp/runtime/optim/step_state.py",
     "if self._skips == self._policy.max_consecutive_skips",
     "if self._skips - 1 == self._policy.max_consecutive_skips"),
    ("optim", "a replay writes to weights twice",
     "zbpp/runtime/optim/stage_optimizer.py",
     "        if self._is_invalid:\n", "        if False:\n"),
    ("optim", "clipping needs no rollback", "zbpp/runtime/optim/stage_optimizer.py",
     "pending.result.speculative and decision.requires_rollback",
     "pending.result.speculative and decision.skipped"),
    ("optim", "copies of a tied one count in the norm",
     "zbpp/runtime/optim/stage_optimizer.py",
     "[p for p in parameters if p not in stage.ties.copies]", "[*parameters]"),
    # ---- ties
    ("ties", "aliases keep the memory of another time", "zbpp/runtime/ties/stage.py",
     "if numbers_of(alias) != numbers_of(tied.parameter)", "if False"),
    ("ties", "aliases are frozen by themselves", "zbpp/runtime/ties/stage.py",
     "alias.requires_grad_(tied.parameter.requires_grad)", "pass"),
    ("ties", "layers stay untied", "zbpp/runtime/ties/stage.py",
     "if module._parameters.get(key) is leaf", "if False"),
    ("ties", "aliases are no tie", "zbpp/runtime/ties/plan.py",
     "return *memory, part.dtype, part.shape, part.stride()", "return id(parameter)"),
    ("ties", "each stage of a process adds the sum", "zbpp/runtime/ties/stage.py",
     "if tied.is_stepped and tied.parameter.requires_grad",
     "if tied.parameter.requires_grad"),
    ("ties", "a gradient from before is lost", "zbpp/runtime/ties/stage.py",
     "if tied.earlier_grad is not None", "if False"),
    # ---- executor, and the files beside it
    ("executor", "micro-batches of no weight count", "zbpp/runtime/loss.py",
     "self._weights[microbatch] == 0:", "self._weights[microbatch] is None:"),
    ("executor", "ignored tokens weigh", "zbpp/runtime/microbatches.py",
     "return (targets != IGNORED).sum()", "return int(targets.numel())"),
    ("core", "the first chunks get the odd layers", "zbpp/core/placement.py",
     "min(from_ends) < more", "from_ends[0] < 2 * more"),
    ("executor", "buffers restored by reference", "zbpp/runtime/recompute.py",
     "buffer.data.copy_(copy)", "buffer.data = copy"),
    ("executor", "each process keeps the first slice", "zbpp/runtime/recompute.py",
     "flat[rank * size : (rank + 1) * size]", "flat[:size]"),
    ("executor", "inputs of chunks stay whole", "zbpp/runtime/stage.py",
     "x.data = x.new_empty(()).expand_as(x)", "pass"),
    ("executor", "gathers beside other communication", "zbpp/runtime/recompute.py",
     "network_is_free.wait()", "network_is_free.is_set()"),
    ("executor", "slices of inputs that differ", "zbpp/runtime/recompute.py",
     "if not torch.equal(_bytes_of(whole), _bytes_of(x)):", "if False:"),
    ("executor", "the first steps, not the last", "zbpp/runtime/job_times.py",
     "list(self._steps)[-n:]", "list(self._steps)[:n]"),
    ("executor", "a changed input is recomputed from", "zbpp/runtime/recompute.py",
     "x._version != version for x, version in before", "x is None for x, _ in before"),
    ("executor", "a replay reads a changed batch", "zbpp/runtime/replay.py",
     "if tensor._version != version:", "if tensor._version < version:"),
    ("executor", "passes always run in a row", "zbpp/runtime/overlap.py",
     "return chunk in self._with_points", "return False"),
    ("executor", "F begins every pair", "zbpp/runtime/executor.py",
     "if overlap.has_points(pair.backward.chunk):", "if not pair:"),
    ("executor", "a backward has no points", "zbpp/runtime/overlap.py",
     "if here is not None and not here.is_forward:", "if here is None:"),
    ("executor", "passes communicate at once", "zbpp/runtime/overlap.py",
     "        before.wait()\n", "        before.is_set()\n"),
    ("executor", "recomputed forwards communicate at once",
     "zbpp/runtime/overlap.py",
     "self._overlap.network_is_free.wait()", "self._overlap.network_is_free.is_set()"),
    ("executor", "a pass goes on out of turn", "zbpp/runtime/overlap.py",
     "self._has_communicated.set()\n        self._go.acquire()",
     "self._has_communicated.set()"),
    ("executor", "a W adds beside what its B has set aside",
     "zbpp/runtime/backward/order.py",
     "if not (reports or self._n_running_apart) and", "if not reports and"),
    ("executor", "recomputed forwards change places", "zbpp/runtime/overlap.py",
     "if not self.is_forward:", "if self is None:"),
    ("executor", "the second thread has torch's defaults",
     "zbpp/runtime/support/thread_state.py",
     "return self._context.run(self._run, function)", "return function()"),
    ("executor", "a pass goes on after an error of another",
     "zbpp/runtime/overlap.py",
     "if self._is_stopped:\n            raise", "if self._is_over:\n            raise"),
    ("executor", "the pass that waits is named", "zbpp/runtime/executor.py",
     "instruction = self.overlap.failed or", "instruction ="),
    ("schedules", "two F's are open at a time", "schedules/passes/parts.py",
     "if x.kind is F or x.chunk == chunk]", "if x.chunk == chunk]"),
    ("schedules", "a W ends before its B", "schedules/passes/parts.py",
     "yield from end([Pass(B, chunk, of.microbatch)])", "pass"),
    ("schedules", "passes are open at a V", "schedules/passes/parts.py",
     "yield from end([*is_open])", "yield from end([])"),
    ("schedules", "an F is planned beside another one",
     "schedules/planner/compiled/list_scheduler.c",
     "if (q < draft->of->n_chunks && stage->n_f) return 1;", ""),
    # ---- pipeline
    ("pipeline", "keep=0", "zbpp/checkpoint/state.py",
     "if keep is not None and keep < 1", "if keep is not None and keep < 0"),
    ("pipeline", "another number of micro-batches has the old program",
     "zbpp/pipeline/pipeline.py",
     "n_microbatches=call.n_microbatches", "n_microbatches=self.n_microbatches"),
    # ---- memory
    ("memory", "a copy alone is the peak", "zbpp/memory/tracking.py",
     "self.most = max(self.most, self.now + bytes_of(args[:1], self._block))",
     "self.most = max(self.most, bytes_of(args[:1], self._block))"),
    ("memory", "B frees the next layer's input", "zbpp/memory/layers.py",
     "change_b = tracker.now - base + left_output", "change_b = tracker.now - base"),
    ("memory", "casts of a chunk pile up", "zbpp/runtime/chunk.py",
     "torch.clear_autocast_cache()", "pass"),
    ("memory", "steps of layers add up", "zbpp/memory/estimate.py",
     "step = layers.step(here,", "step = layers.step([0],"),
    ("memory", "every stage's step is traced", "zbpp/memory/estimate.py",
     "if stages.peaks == at_passes.peaks:", "if False:"),
    ("memory", "no messages", "zbpp/core/layers.py",
     "self.messages_at_once * max(x) + n_sent * sum(x)", "0.0"),
    ("memory", "no batch", "zbpp/memory/layers.py",
     "[self.fake.inputs] * (layer == 0)", "[]"),
    ("memory", "the last bucket is the largest", "zbpp/memory/layers.py",
     "peak = max(peak, tracker.most - base)", "peak = tracker.most - base"),
    # ---- profiling
    ("profiling", "a plan trains the layers", "zbpp/tuning.py",
     'x.detach().to("cpu", copy=True)', 'x.detach()'),
    ("profiling", "a link is slower", "zbpp/profiling/links.py",
     "fit_link([small, large])", "fit_link([large, (2 * small[0], large[1])])"),
    ("profiling", "slow passes count as they are", "zbpp/profiling/means.py",
     "fmean(min(time, far) for time in times)", "fmean(times)"),
    ("profiling", "away from the measured step", "zbpp/profiling/prediction.py",
     "self.step_measured / self.step_predicted - 1",
     "1 - self.step_predicted / self.step_measured"),
    ("profiling", "the loss is communicated", "zbpp/profiling/join.py",
     "if len(fitted) % 2:", "if False:"),
    ("profiling", "communication is stretched as computing is",
     "zbpp/profiling/join.py", "min(sum(fitted[1::2]), time)",
     "time * sum(fitted[1::2]) / sum(fitted)"),
    ("core", "B has its layers in the order of F", "zbpp/core/layers.py",
     "for i in reversed(chunk))", "for i in chunk)"),
    ("profiling", "layers take as long as alone", "zbpp/profiling/join.py",
     "[whole * x / total", "[x"),
    # ---- models
    ("models", "arguments of another batch", "zbpp/models/pretrained.py",
     "if not self._seen or self._seen[0] != seen:", "if not self._seen:"),
    ("models", "arguments need no equal numbers", "zbpp/models/pretrained.py",
     "torch.equal(a, b))", "True)"),
    ("models", "tables draw in training", "zbpp/models/pretrained.py",
     "            table.eval()", "            pass"),
    ("models", "one graph for both modes", "zbpp/models/exported.py",
     "mode = int(not self.training)", "mode = 0"),
    ("models", "any shapes", "zbpp/models/exported.py",
     "if shapes != expected:", "if len(shapes) != len(expected):"),
    ("models", "shifted labels", "zbpp/models/hugging_face.py",
     "(labels[..., 1:] != IGNORED)", "(labels != IGNORED)"),
    ("models", "copies of parameters", "zbpp/models/exported.py",
     "part._parameters[key] = original._parameters[key]", "pass"),
    # ---- checkpoint
    ("checkpoint", "one more is kept", "zbpp/checkpoint/folder.py",
     "[keep - 1 :]", "[keep:]"),
    ("checkpoint", "hashes are not compared", "zbpp/checkpoint/format.py",
     "elif _sha256_of(path) != file.sha256", "elif not file.sha256"),
    ("checkpoint", "strays are read", "zbpp/checkpoint/format.py",
     'for path in folder.glob("*.safetensors")} - expected',
     'for path in folder.glob("*.safetensors")} & set()'),
    ("checkpoint", "each file is hashed by the first rank", "zbpp/checkpoint/folder.py",
     "range(rank, len(manifest.files), len(answers))",
     "range(rank, len(answers), len(answers))"),
    ("checkpoint", "shards begin at 0", "zbpp/checkpoint/format.py",
     "tuple(chunk.offsets))", "(0,) * tensor.dim())"),
    ("checkpoint", "replicas save, too", "zbpp/checkpoint/state.py",
     "if peers.owns(local_part(tensor).names)", "if True"),
    ("checkpoint", "the extra of another rank", "zbpp/checkpoint/state.py",
     "if rank == 0:\n        values |=", "if is_first:\n        values |="),
    ("checkpoint", "one place of a tied tensor is filled", "zbpp/checkpoint/format.py",
     "rest = [(name, x) for name, x in rest if targets[name] is not x]", "rest = []"),
    ("checkpoint", "a host copy of another shape", "zbpp/checkpoint/save.py",
     "if copy is None or (copy.shape, copy.dtype) != kind",
     "if copy is None"),
    ("checkpoint", "a part that failed is read", "zbpp/checkpoint/save.py",
     "if self.rank == 0 and failure is None", "if self.rank == 0"),
    ("checkpoint", "a replaced checkpoint is removed first",
     "zbpp/checkpoint/folder.py",
     "    partial.rename(final)\n",
     "    for path in replaced:\n        shutil.rmtree(path)\n"
     "    partial.rename(final)\n"),
    # ---- emulation
    ("emulation", "a pass takes its time after what torch needs", "zbpp/emulation.py",
     "            due = end(*args)\n            result = method(*args)\n",
     "            result = method(*args)\n            due = end(*args)\n"),
    ("emulation", "an optimizer step takes no time", "zbpp/emulation.py",
     "time.perf_counter() + step_s", "time.perf_counter()"),
    # ---- training
    ("training", "the first step has no rate", "zbpp/training/train.py",
     "(step + 1) / _WARM_UP_STEPS", "step / _WARM_UP_STEPS"),
    ("training", "a follower is the cause", "zbpp/training/launch.py",
     "if isinstance(error, PeerError)", "if not isinstance(error, PeerError)"),
    ("training", "the hash goes by stages", "zbpp/training/train.py",
     "for name in sorted(everywhere))", "for name in everywhere)"),
    ("training", "deep models start as shallow ones", "zbpp/training/llama.py",
     "std /= math.sqrt(additions)", "pass"),
    ("training", "validation data is trained on", "zbpp/training/text.py",
     "texts[x] for x in texts if x not in held_out", "texts[x] for x in texts"),
    # ---- cli
    ("cli", "over the limit is within", "zbpp/cli/estimate.py",
     "if limit is None or stage.peak <= limit else",
     "if limit is None or stage.peak >= limit else"),
    ("cli", "longer is shorter", "zbpp/cli/report.py",
     "'shorter' if gain >= 0 else 'longer'", "'longer' if gain >= 0 else 'shorter'"),
    ("cli", "a folder that is not there", "zbpp/training/options.py",
     "if not path.parent.is_dir()", "if not path.parent.name"),
    ("cli", "the costs of a plan are lost", "zbpp/cli/flags.py",
     "if self.enable_optimizer_post_validation in (None, checks)",
     "if self.enable_optimizer_post_validation in (None, not checks)"),
    # ---- bench
    ("bench", "NaN is right", "zbpp/bench/run.py",
     "if not math.isclose(wanted, found, rel_tol=tolerance)",
     "if abs(found - wanted) > tolerance * abs(wanted)"),
    ("bench", "the norm is that of a stage", "zbpp/bench/torchs.py",
     "dist.all_reduce(squared)", "pass"),
    # ---- a simulated GPU
    ("simgpu", "an event is recorded again, not waited for",
     "zbpp/runtime/support/streams.py",
     "self._event.synchronize()", "self._event.record()"),
    ("simgpu", "masters are stepped while they are copied",
     "zbpp/runtime/optim/host.py",
     "self.wait()\n        self._stale = set(self.masters)",
     "self._stale = set(self.masters)"),
    ("simgpu", "one pinned buffer for all copies", "zbpp/runtime/support/streams.py",
     "    return staged.copy_(tensor).to(",
     "    staged = globals().setdefault('_ONLY', {}).setdefault(\n"
     "        (tuple(tensor.shape), tensor.dtype), staged\n"
     "    )\n"
     "    return staged.copy_(tensor).to("),
    ("simgpu", "a sent tensor is let go before it has left",
     "zbpp/runtime/comm/links.py",
     "return _Sent(work, tensor, value, peer)",
     "return (work.synchronize(), _Sent(work, None, value, peer))[1]"),
    ("simgpu", "a copy to the host before the message has come",
     "zbpp/runtime/comm/links.py",
     "with self._side:\n            work.wait()",
     "with self._side:\n            HostCopy(buffer).done()"),
    ("simgpu", "receives in another order than sends", "zbpp/runtime/comm/mailbox.py",
     "posted = waiting[0]\n", "posted = waiting[-1]\n"),
    ("simgpu", "one communicator for both directions", "zbpp/runtime/comm/groups.py",
     "{name}/{both[0]}_to_{both[1]}", "{name}/{min(both)}_to_{max(both)}"),
)
# fmt: on

_CALLS = (
    "wait|wait_stream|wait_event|synchronize|confirm|record|record_stream|join|flush"
)
WAITS = (
    (re.compile(rf"^( +)[a-z][\w.()\[\]-]*\.(?:{_CALLS})\(.*\)$"), r"\1pass"),
    (re.compile(r"^( +)with .*(?:running\(\)|stream\(.*\)|stream):$"), r"\1if True:"),
    (re.compile(r"^(.*(?:pin_memory|non_blocking)=)True"), r"\1False"),
)
"""Lines that order streams, and what becomes of each."""
OF_HOSTS = {"ping.py", "groups.py", "failures.py", "process_group.py"}
"""Files of ``comm`` whose waits are for threads and stores of the host."""
UNSEEN = {
    "work.wait(self._failures.timeout)": "for gloo, where the host waits",
    "self.wait(work, context, None)": "for its time-out",
    "self._hosts.wait(work, context, peer)": "for gloo, where the host waits",
    'self._hosts.wait(work, ("the numbers of", value, "to"), peer)': "for gloo",
    "self.optimizer.wait(job)": "the job waits itself, which then counts as its time",
    "self._pending.result.wait(job)": "the decision waits too, and names no job",
    "result.wait(job)": "the decision waits too, and names no job",
    "self.flush()": "reading the sum of the step has done so",
    "before.wait()": "it orders hosts: a row of room executor",
    "self._overlap.network_is_free.wait()": "likewise",
    "self._tied.wait()": "the references lose a sum too: tests/bits/test_meshes",
    "self._thread.join()": "after an error, which tests/bits/test_overlap.py sees",
    "self._link.flush()": "reading the sum of the step has done so",
    "self._waits.confirm(sent.work)": "sums of the last steps have been read",
    "executor.transport.flush()": "sums of the last steps have been read",
    "torch.accelerator.current_stream().wait_event(event)": "a later event is awaited",
    "with self._side.stream:": "the order is the same, less runs at a time",
    "with self.network.running():": "the order is the same, less runs at a time",
    "with self._side.running():": "the order is the same, less runs at a time",
}
"""Lines that can be left out in these runs, and why."""


def without_waits() -> Iterator[Mutant]:
    """A mutant for each line of the runtime that orders streams."""
    for path in sorted((ROOT / "zbpp/runtime").rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for i, line in enumerate(lines if path.name not in OF_HOSTS else ()):
            for pattern, new in WAITS:
                match = pattern.match(line)
                if match is None or line.strip() in UNSEEN:
                    continue
                first = i  # as many lines before as make the text the only one
                while text.count("\n".join(lines[first : i + 1])) > 1:
                    first -= 1
                before = "".join(f"{x}\n" for x in lines[first:i])
                changed = before + match.expand(new) + line[match.end() :]
                file = str(path.relative_to(ROOT))
                name = f"{file[13:]}:{i + 1} without {line.strip()}"
                yield Mutant("simgpu", name, file, before + line, changed)


MUTANTS = (*(Mutant(*row) for row in TABLE), *without_waits())


def copy_tree(to: Path) -> None:
    """Copy what git knows of the tree, and the planner's compiled loops."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    loops = [str(path.relative_to(ROOT)) for path in ROOT.glob("schedules/**/*.shared")]
    for name in [*listed.split("\0")[:-1], *loops]:
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target, follow_symlinks=False)


def tests_of(mutant: Mutant, copy: Path) -> Iterator[list[str]]:
    """Arguments for pytest: the paths of the room that exist; slow ones come last."""
    paths = [path for path in TESTS[mutant.room].split() if (copy / path).exists()]
    if mutant.room != "simgpu" and (copy / EXAMPLES).exists():
        paths.append(EXAMPLES)
    yield [*paths, "-m", "not slow"]
    if mutant.room in SLOW:
        yield [*paths, "-m", "slow"]


def run(copy: Path, tests: list[str]) -> str:
    """The test that fails first; nothing if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    folders = [str(copy / "src"), os.environ.get("PYTHONPATH", "")]
    if tests[0].startswith("tests/simgpu"):
        command += ["-p", "no:faulthandler"]
        folders = [*(str(copy / x) for x in SIMULATED), *folders]
    paths = os.pathsep.join(folders)
    process = subprocess.Popen(
        [*command, "--tb=no", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LATE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "too late"
    if process.returncode in (0, 5):  # 5: no test was selected
        return ""
    failed = _FAILED.search(output)
    return failed[1] if failed else f"exit code {process.returncode}: {output[-300:]}"


def judge(mutant: Mutant, copy: Path) -> str:
    """The test that catches it, "" or "stale"."""
    path = copy / mutant.file
    text = path.read_text() if path.exists() else ""
    if text.count(mutant.old) != 1:
        return "stale"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        return next(filter(None, (run(copy, x) for x in tests_of(mutant, copy))), "")
    finally:
        path.write_text(text)


def print_table(found: dict[str, dict[str, str]]) -> None:
    """Print the share of each room, and what no test has caught."""
    print("| room | mutants | caught | stale |\n|---|---|---|---|")
    for room in [*TESTS, ""]:
        own = [x["caught"] for x in found.values() if room in ("", x["room"])]
        n_stale = own.count("stale")
        n_caught = len(own) - n_stale - own.count("")
        print(f"| {room or 'all'} | {len(own)} | {n_caught} | {n_stale} |")
    for name, result in found.items():
        if result["caught"] in ("", "stale"):
            print(result["caught"] or "SURVIVOR", name, sep=" | ")


def chosen(room: str) -> Iterator[tuple[str, Mutant]]:
    """The mutants of a room, or all, by their names."""
    for mutant in MUTANTS:
        if room in ("", mutant.room):
            yield f"{mutant.room}: {mutant.name}", mutant


def print_list(room: str) -> int:
    """Print which mutants are stale, and which tests do not exist; return how many."""
    n_stale = 0
    for name, mutant in chosen(room):
        path = ROOT / mutant.file
        if not path.exists() or path.read_text().count(mutant.old) != 1:
            n_stale += 1
            print("stale", name, sep=" | ")
    for owner, tests in TESTS.items():
        for test in tests.split():
            if room in ("", owner) and not (ROOT / test).exists():
                n_stale += 1
                print("absent", owner, test, sep=" | ")
    print(f"{len([*chosen(room)])} mutants, {n_stale} stale or without their tests")
    return n_stale


def main() -> int:
    """Judge them; done ones of the file of results are not judged again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", default="", choices=["", *TESTS])
    parser.add_argument("--results", type=Path, help="JSON, continued if it exists")
    parser.add_argument(
        "--list", action="store_true", help="judge none, print what is stale"
    )
    options = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    if options.results and options.results.exists():
        found = json.loads(options.results.read_text())
    collected: set[str] = set()
    if options.list:
        return print_list(options.room)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_tree(copy)
        for name, mutant in chosen(options.room):
            if found.get(name, {}).get("caught", "stale") != "stale":
                continue
            if mutant.room not in collected:  # else all would count as caught
                collected.add(mutant.room)
                for tests in tests_of(mutant, copy):
                    if failed := run(copy, [*tests, "--collect-only"]):
                        sys.exit(f"without any mutant, {failed}")
            began = time.monotonic()
            caught = judge(mutant, copy)
            found[name] = {"room": mutant.room, "caught": caught}
            took = f"{time.monotonic() - began:.0f} s"
            print(name, caught or "SURVIVOR", took, sep=" | ", flush=True)
            if options.results:
                options.results.write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)
    return any(x["caught"] in ("", "stale") for x in found.values())


if __name__ == "__main__":
    sys.exit(main())
