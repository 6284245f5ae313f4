"""Mistakes put into zbpp's GPU code, one at a time: does a test see each of them?

    make mutants ARGS="--room simgpu [--only TEXT] [--jobs 2]"

Every wait, event, `record_stream`, stream context and pinned buffer in zbpp/runtime is
taken out by rules over the syntax tree, and some are swapped by hand. A mutant runs in
a process forked from this one, which has imported all: functions get the mutant's code.
The net is that of `scenarios.py` under each policy. What it does not catch must stand
in `EXPLAINED`, or this script fails; so it does where a mistake made by hand has lost
its place.
"""

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
import torch._dynamo  # noqa: TID253 - now, as every process would for its optimizer
import torch.distributed as dist

import simgpu
import zbpp.runtime
from simgpu.jobs import name_jobs
from simgpu.scenarios import NET, Outcome, Scenario, differences
from zbpp.runtime import use_loopback
from zbpp.runtime.testing import initialise

ROOT = Path(zbpp.runtime.__path__[0])
POLICIES = (("lazy", 0), ("random", 1), ("eager", 0), ("random", 2), ("random", 3))
ONLY_HOST = {
    "comm/ping.py",
    "comm/groups.py",
    "comm/failures.py",
    "comm/process_group.py",
}
"""Their waits are for threads and stores of the host, or for times to be measured."""
AT_THE_END = {"_is_idle", "_end_at_exit", "let_go"}
"""Functions for failures and the end of Python: what they wait for is of the host."""

DROPPED = {
    "wait",
    "wait_stream",
    "wait_event",
    "synchronize",
    "confirm",
    "record",
    "record_stream",
    "hand_over",
    "take_over",
    "fork",
    "join",
    "_record_end",
    "_wait_for_end",
    "finish_older",
    "flush",
}
ASKED = {"query", "is_completed", "done"}
CONTEXTS = {"running", "aside", "stream", "device_stream"}
KEYWORDS = {"pin_memory", "non_blocking"}


@dataclass(frozen=True)
class Mutant:
    """One change of one function.

    Args:
        file: below zbpp/runtime.
        line: in the file.
        function: its qualified name.
        what: is changed, in words.
        change: changes the tree of the function.
    """

    file: str
    line: int
    function: str
    what: str
    change: Callable[[ast.AST], None] = field(compare=False)

    @property
    def name(self) -> str:
        """Stays the same when lines move."""
        return f"{self.file} {self.function}: {self.what}"


# ---- Mutants by rules.


class _Replace(ast.NodeTransformer):
    """Puts another node, or several statements, in the place of one."""

    def __init__(self, target: tuple[type, int, int], new: Any) -> None:
        self.target, self.new, self.n_done = target, new, 0

    def generic_visit(self, node: ast.AST) -> Any:
        place = type(node), getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
        if place == self.target and not self.n_done:
            self.n_done += 1
            new = self.new(node)
            for one in new if isinstance(new, list) else [new]:
                ast.copy_location(one, node)
            return new
        return super().generic_visit(node)


def _replacing(node: Any, new: Callable[[Any], Any]) -> Callable[[ast.AST], None]:
    def change(tree: ast.AST) -> None:
        replace = _Replace((type(node), node.lineno, node.col_offset), new)
        replace.visit(tree)
        assert replace.n_done == 1

    return change


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module and methods of its classes, with what is within them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def _attribute(node: ast.AST) -> str:
    """The name of a method that is called, or nothing."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    if isinstance(node.func.value, ast.Constant):  # ", ".join
        return ""
    return node.func.attr


def _by_rules(file: str, function: str, tree: ast.AST) -> Iterator[Mutant]:
    def mutant(node: Any, verb: str, new: Callable[[Any], Any]) -> Mutant:
        text = ast.unparse(node).split("\n")[0]
        what = f"{verb} `{text[:64]}`"
        return Mutant(file, node.lineno, function, what, _replacing(node, new))

    n_as_statement = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _attribute(node.value) in DROPPED:
            n_as_statement.add(id(node.value))
            yield mutant(node, "without", _without)
        elif isinstance(node, ast.With):
            names = [_attribute(item.context_expr) for item in node.items]
            texts = [ast.unparse(item.context_expr) for item in node.items]
            if CONTEXTS & {*names} or any(x.endswith("stream") for x in texts):
                yield mutant(node, "without", lambda with_: with_.body)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in KEYWORDS:
                    yield mutant(keyword.value, f"no {keyword.arg}:", _false)
            name = _attribute(node)
            is_value = id(node) not in n_as_statement
            is_question = name in ASKED and not node.args
            if (is_question or name == "wait") and is_value:
                yield mutant(node, "not asked:", lambda _: ast.Constant(True))


def _without(statement: ast.Expr) -> ast.stmt:
    """Leave out a call; what it is called of, if that is a call too, stays."""
    called = statement.value
    assert isinstance(called, ast.Call) and isinstance(called.func, ast.Attribute)
    before = called.func.value
    return ast.Expr(before) if isinstance(before, ast.Call) else ast.Pass()


def _false(_: Any) -> ast.AST:
    return ast.Constant(False)


def mutants_by_rules() -> list[Mutant]:
    """All of them, in the order of files and lines."""
    made = []
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if file in ONLY_HOST:
            continue
        for function, tree in _functions(ast.parse(path.read_text())):
            if function.rpartition(".")[2] in AT_THE_END:
                continue
            made += sorted(_by_rules(file, function, tree), key=lambda x: x.line)
    return made


# ---- Mutants by hand.

BY_HAND: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "support/streams.py", "HostCopy.read",
        "self._event.synchronize()", "self._event.record()",
        "an event that is recorded again, not waited for",
    ),
    (
        "support/streams.py", "sent_ahead",
        "staged.copy_(tensor).to(device, non_blocking=True)",
        "globals().setdefault('_ONLY', {})"
        ".setdefault((tuple(tensor.shape), tensor.dtype), staged).copy_(tensor)"
        ".to(device, non_blocking=True)",
        "one pinned buffer for all copies",
    ),
    (
        "stage.py", "Stage.backward_weight",
        "run(microbatch, self._saved.pop((chunk, microbatch)).graph)",
        "(lambda on, before: (on.set_stream(on.Stream()), run(microbatch, "
        "self._saved.pop((chunk, microbatch)).graph), on.set_stream(before)))("
        "__import__('torch').cuda, __import__('torch').cuda.current_stream())",
        "W on another stream",
    ),
    (
        "comm/links.py", "P2PLink.send",
        "self._sends.append(_Sent(work, tensor, value, peer))",
        "(self._sends.append(_Sent(work, None, value, peer)), work.synchronize())",
        "a sent tensor is let go before it has left",
    ),
    (
        "comm/links.py", "StreamWaits.copy_after",
        "work.wait()", "HostCopy(buffer).done()",
        "a copy to the host before the message has come",
    ),
    (
        "comm/mailbox.py", "Mailbox._start_known",
        "waiting.popleft()", "waiting.pop()",
        "receives in another order than sends",
    ),
    (
        "comm/mailbox.py", "Mailbox.send",
        "enumerate(tensors)", "[*enumerate(tensors)][::-1]",
        "tensors of a value in another order than they are received",
    ),
    (
        "comm/groups.py", "open_groups",
        "f'{name}/{ends[0]}_to_{ends[1]}'", "f'{name}/{min(ends)}_to_{max(ends)}'",
        "one communicator for both directions",
    ),
)  # fmt: skip


def mutants_by_hand() -> list[Mutant]:
    """All of them.

    Raises:
        LookupError: the code that is to be changed is not there any more.
    """
    made = []
    for file, function, old, new, what in BY_HAND:
        trees = dict(_functions(ast.parse((ROOT / file).read_text())))
        if function not in trees:
            raise LookupError(f"{file} has no {function}: mend the mutant {what!r}")
        node = _node_like(trees[function], old)
        if node is None:
            raise LookupError(f"{function} of {file} has no {old!r}: mend {what!r}")
        replacement = ast.parse(new, mode="eval").body
        change = _replacing(node, lambda _, made=replacement: copy.deepcopy(made))
        made.append(Mutant(file, node.lineno, function, what, change))
    return made


def _node_like(tree: ast.AST, text: str) -> Any:
    wanted = ast.dump(ast.parse(text, mode="eval").body)
    return next(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.expr) and ast.dump(node) == wanted
        ),
        None,
    )


# ---- Putting one in.


def install(mutant: Mutant) -> None:
    """Give the functions of this process the mutant's code.

    Raises:
        LookupError: there is no such function.
    """
    path = ROOT / mutant.file
    tree = ast.parse(path.read_text())
    mutant.change(dict(_functions(tree))[mutant.function])
    ast.fix_missing_locations(tree)
    functions = [
        x
        for x in gc.get_objects()
        if type(x) is FunctionType
        and x.__code__.co_qualname == mutant.function
        and os.path.realpath(x.__code__.co_filename) == os.path.realpath(path)
    ]
    if not functions:
        raise LookupError(f"nothing has imported {mutant.function} of {mutant.file}")
    whole = compile(tree, functions[0].__code__.co_filename, "exec", dont_inherit=True)
    for function in functions:
        function.__code__ = _code_like(whole, function.__code__)


def _code_like(whole: CodeType, old: CodeType) -> CodeType:
    stack = [whole]
    while stack:
        code = stack.pop()
        if (code.co_qualname, code.co_firstlineno) == (
            old.co_qualname,
            old.co_firstlineno,
        ):
            return code
        stack += [x for x in code.co_consts if isinstance(x, CodeType)]
    raise LookupError(f"{old.co_qualname} is gone")


# ---- Runs, each in processes of its own.


@dataclass
class Run:
    """What a scenario under a policy has brought, in all of its processes."""

    outcome: Outcome = field(default_factory=Outcome)
    reports: list[str] = field(default_factory=list)
    error: str = ""

    def add(self, other: "Run") -> None:
        """Take in another process's part."""
        self.outcome.add(other.outcome)
        self.reports += other.reports
        self.error = self.error or other.error


class Fork:
    """A function in a forked process.

    Args:
        function: called there; what it returns comes back.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        handle, self._file = tempfile.mkstemp()
        os.close(handle)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            if os.environ.get("MUTANTS_SAY") is None:
                silence = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silence, 1)
                os.dup2(silence, 2)
            torch.save(function(), self._file)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def ended(self) -> bool:
        """True if it is over."""
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def result(self, deadline: float) -> Any:
        """What it has returned; None: it has died, or is late."""
        while not self.ended():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                break
            time.sleep(0.005)
        return self.taken()

    def taken(self) -> Any:
        """What an ended one has returned."""
        with contextlib.suppress(EOFError, RuntimeError):
            made = torch.load(self._file, weights_only=False)
            os.unlink(self._file)
            return made
        os.unlink(self._file)
        return None


def run_here(scenario: Scenario, policy: str, seed: int) -> Run:
    """Run one in this process."""
    made = Run()
    simgpu.begin(policy, seed, patience_s=8.0)
    try:
        made.outcome = scenario.run()
    except Exception as error:
        torch.cuda.set_sync_debug_mode("default")
        made.error = f"{type(error).__name__}: {error}".split("\n")[0]
        if os.environ.get("MUTANTS_SAY"):
            traceback.print_exc()
    made.reports = simgpu.reports()
    return made


def _run_rank(
    scenario: Scenario, policy: str, seed: int, folder: str, rank: int
) -> Run:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(scenario.n_processes)}
    use_loopback()
    simgpu.use_processes(folder, rank, scenario.n_processes)
    store = dist.FileStore(f"{folder}/store", scenario.n_processes)
    initialise(simgpu.DEVICE, timeout_s=20.0, store=store)
    return run_here(scenario, policy, seed + rank)


def run_processes(scenario: Scenario, policy: str, seed: int) -> Run:
    """Run one in forked processes; one alone may be lost with all the others."""
    made = Run()
    deadline = time.monotonic() + 40.0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ranks = [
            Fork(lambda rank=rank: _run_rank(scenario, policy, seed, folder, rank))
            for rank in range(scenario.n_processes)
        ]
        for rank in ranks:
            part = rank.result(deadline)
            made.add(part or Run(error="a process has died, or has hung"))
            if made.error:
                deadline = min(deadline, time.monotonic() + 5.0)
    return made


def run_apart(scenario: Scenario, policy: str, seed: int) -> Run:
    """Run one in a process of its own, or in as many as it takes."""
    if scenario.n_processes > 1:
        return run_processes(scenario, policy, seed)
    fork = Fork(lambda: run_here(scenario, policy, seed))
    return fork.result(time.monotonic() + 60.0) or Run(error="the process has died")


# ---- What catches a mutant.


@dataclass
class Net:
    """References and waits of the code as it is."""

    references: dict[str, Outcome] = field(default_factory=dict)
    waits: dict[str, set[tuple[str, str, str]]] = field(default_factory=dict)
    policies: Sequence[tuple[str, int]] = POLICIES
    """Under which mutants run."""

    def verdict(self, scenario: Scenario, run: Run) -> list[str]:
        """By what a run shows that something is wrong; nothing if it shows nothing."""
        caught = ["checker"] if run.reports else []
        if run.error:
            return [*caught, "error"]
        if differences(run.outcome, self.references[scenario.name]):
            caught.append("numbers")
        if run.outcome.waits - self.waits.get(scenario.name, set()):
            caught.append("wait")
        return caught

    def text(self, scenario: Scenario, policy: tuple[str, int], run: Run) -> str:
        """The verdict in words; empty: the run is as it should be."""
        caught = self.verdict(scenario, run)
        if not caught:
            return ""
        detail = run.error if caught == ["error"] else ""
        return f"{'+'.join(caught)} | {scenario.name}, {policy[0]} | {detail[:90]}"


def make_net(scenarios: Sequence[Scenario], n_policies: int) -> Net:
    """Run all as they are.

    Raises:
        AssertionError: the net catches code that is right.
    """
    net = Net(policies=POLICIES[:n_policies])
    known: list[tuple[Scenario, Outcome]] = []
    for scenario in scenarios:
        wanted = scenario.reference
        outcome = next((found for other, found in known if other == wanted), None)
        if outcome is None:
            made = run_apart(wanted, "eager", 0)
            assert not made.error, f"{scenario.name}: {made.error}"
            outcome = made.outcome
            known.append((wanted, outcome))
        net.references[scenario.name] = outcome
    for scenario in scenarios:
        began = time.monotonic()
        runs = [run_apart(scenario, *policy) for policy in net.policies]
        waits = [run.outcome.waits for run in runs]
        net.waits[scenario.name] = set[tuple[str, str, str]]().union(*waits)
        for policy, run in zip(net.policies, runs, strict=True):
            caught = net.verdict(scenario, run)
            where = f"{scenario.name}, {policy}: {caught}"
            assert not caught, f"{where} {run.error} {run.reports[:1]}"
        print(f"  {scenario.name}: clean, {time.monotonic() - began:.1f} s", flush=True)
    return net


def judge(mutant: Mutant, net: Net, scenarios: Sequence[Scenario]) -> str:
    """Run a mutant until something catches it; say what, or nothing."""
    install(mutant)
    if mutant.name in EXPLAINED:
        net = replace(net, policies=POLICIES[:1])
    ordered = in_order(mutant, scenarios)
    alone = [x for x in ordered if x.n_processes == 1]
    others = [x for x in ordered if x.n_processes > 1]
    if ordered[0].n_processes > 1:
        return _judge_processes(others, net) or _judge_alone(alone, net)
    return _judge_alone(alone, net) or _judge_processes(others, net)


def _judge_alone(scenarios: Sequence[Scenario], net: Net) -> str:
    fork = Fork(lambda: _first_verdict(scenarios, net, run_here))
    verdict: str | None = fork.result(time.monotonic() + 150.0)
    return "error | the process has died, or has hung |" if verdict is None else verdict


def _judge_processes(scenarios: Sequence[Scenario], net: Net) -> str:
    return _first_verdict(scenarios, net, run_processes)


def _first_verdict(
    scenarios: Sequence[Scenario], net: Net, run: Callable[..., Run]
) -> str:
    for scenario in scenarios:
        for policy in net.policies:
            shown = net.text(scenario, policy, run(scenario, *policy))
            if shown:
                return shown
    return ""


def in_order(mutant: Mutant, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Those that run the code of a mutant; those that were written for it first."""
    is_of_mesh = mutant.file.startswith(("parallel/", "support/fsdp"))
    is_far = mutant.file.startswith("comm/") and mutant.file != "comm/local.py"

    def runs(scenario: Scenario) -> bool:
        if is_of_mesh or is_far:
            return scenario.n_processes > 1 and (
                "mesh" in scenario.name or not is_of_mesh
            )
        return "mesh" not in scenario.name

    def is_unlikely(scenario: Scenario) -> tuple[bool, ...]:
        return (
            "mesh of shards" in scenario.name and not is_of_mesh,
            (mutant.file == "job_times.py") != ("times" in scenario.name),
        )

    return sorted(filter(runs, scenarios), key=is_unlikely)


_SPEED = "the order is the same, and only what runs beside it is less"
_GLOO = "for gloo, where the host waits; with NCCL it is not reached"
_TWICE = "it is waited for by another line as well: this one is for its time-out"
_TIMES = "the job waits itself; here that does not count as its time"
_CODE = "fused Adam's kernel is Inductor's, which writes none for a simulated GPU"
EXPLAINED: dict[str, str] = {
    "overlap.py _Place.communicate: without `with self.network.running():`": _SPEED,
    "comm/links.py P2PLink.send_numbers: without `with self._waits.beside_jobs():`": (
        _SPEED
    ),
    "comm/links.py P2PLink.receive_numbers: without "
    "`with self._waits.beside_jobs():`": _SPEED,
    "comm/links.py P2PLink.read: without `with self._waits.beside_jobs():`": _SPEED,
    "comm/links.py StreamWaits.copy_after: without `with self._side.running():`": (
        _SPEED
    ),
    "comm/links.py HostWaits.wait: without `work.wait(self._failures.timeout)`": _GLOO,
    "comm/links.py P2PLink.read: without "
    "`self._waits.wait(message.work, context, message.peer)`": _TWICE,
    "comm/mailbox.py Mailbox._read_header: without `self._link.wait(work, "
    "(job, 'for', value, 'from'), peer)`": _TWICE,
    "comm/mailbox.py Mailbox._read_header: without `self._link.confirm(work)`": (
        "`.cpu()` waits too, but has no time-out for a stage that is lost just then"
    ),
    "executor.py TakeStep.run: without `optimizer.wait(job)`": _TIMES,
    "executor.py ValidateStep.run: without `optimizer.wait(job)`": _TIMES,
    "job_times.py JobTimes.begin: without `event.synchronize()`": (
        "only the place of times on the axis that processes share"
    ),
    "job_times.py JobTimes.norm_seconds: without `step.norms[-1][1].synchronize()`": (
        "the host has waited for a sum that is behind it"
    ),
    "comm/mailbox.py Mailbox.end: without `self._link.end()`": (
        "`_read_sum` has done so behind the sum of the step before, if anybody read it"
    ),
    "comm/links.py P2PLink.flush: without `self._waits.confirm(sent.work)`": (
        "when these runs close, the sums of their last steps have been read"
    ),
    "comm/links.py PendingSum.done: not asked: `self._message.work.is_completed()`": (
        "the copy's event is behind it"
    ),
    "driver/stages.py LocalStages.close: without `executor.transport.flush()`": (
        "when these runs close, the sums of their last steps have been read"
    ),
    "parallel/buffers.py Turn.gather: without `gathering.wait()`": (
        "torch gathers later wherever these runs do"
    ),
    "parallel/buffers.py _Gathering.is_completed: not asked: "
    "`self._work.is_completed()`": "torch does not ask",
    "support/fsdp.py Unit.wait: without "
    "`torch.accelerator.current_stream().wait_event(event)`": (
        "`finalize_backward` waits for an event behind it"
    ),
    "comm/links.py PendingSum.done: not asked: `self._message.copy.done()`": (
        "the host then waits for a copy of few bytes, once all stages have summed"
    ),
}
"""By name of a mutant: why nothing can catch it."""


def main() -> int:
    """Judge all mutants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--policies", type=int, default=len(POLICIES))
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    name_jobs()
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        importlib.import_module(".".join(("zbpp.runtime", *parts)))
    mutants = [
        x for x in (*mutants_by_rules(), *mutants_by_hand()) if options.only in x.name
    ]
    if options.list:
        print("\n".join(f"{x.file}:{x.line} {x.function}: {x.what}" for x in mutants))
        return 0
    scenarios = NET
    began = time.monotonic()
    net = make_net(scenarios, options.policies)
    print(f"the net: {time.monotonic() - began:.0f} s", flush=True)
    waiting, running = list(mutants), list[tuple[Mutant, Fork, float]]()
    found: dict[str, str] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            mutant = waiting.pop(0)
            fork = Fork(lambda m=mutant: judge(m, net, scenarios))
            running.append((mutant, fork, time.monotonic()))
        for entry in [x for x in running if x[1].ended()]:
            running.remove(entry)
            mutant, fork, start = entry
            verdict = fork.taken()
            if verdict is None:
                verdict = "not put in"
            found[mutant.name] = verdict
            shown = verdict or f"SURVIVOR: {EXPLAINED.get(mutant.name, 'unexplained')}"
            took = f"{time.monotonic() - start:.1f} s"
            print(
                f"{mutant.file}:{mutant.line} | {mutant.what} | {shown} | {took}",
                flush=True,
            )
        time.sleep(0.01)
    survivors = [name for name, verdict in found.items() if not verdict]
    broken = [name for name, verdict in found.items() if verdict == "not put in"]
    unexplained = [x for x in survivors if x not in EXPLAINED]
    n_caught = len(found) - len(survivors) - len(broken)
    print(
        f"{len(found)} mutants, {n_caught} caught, {len(survivors)} survivors, "
        f"{len(unexplained)} of them unexplained, {len(broken)} could not be put in; "
        f"{time.monotonic() - began:.0f} s"
    )
    return bool(unexplained or broken)


if __name__ == "__main__":
    sys.exit(main())
