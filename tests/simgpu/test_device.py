"""The simulated device: every kind of mistake is reported, right code never is."""

import re
from collections.abc import Callable

import pytest
import torch
from cases import Case, difference, plain, run
from gpu_waits import waits_are_errors

import simgpu

GPU = simgpu.DEVICE
POLICIES = pytest.mark.parametrize("policy", simgpu.POLICIES)
N = 1000

# ---- Mistakes, wrong and right. Each returns if its numbers are right.


def use_before_an_event(is_right: bool) -> bool:
    stream, x = torch.cuda.Stream(), torch.ones(N, device=GPU)
    product = x * 3
    if is_right:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product.record_stream(stream)
        return bool((product == 3).all())


def overwrite_before_an_event(is_right: bool) -> bool:
    stream, x = torch.cuda.Stream(), torch.ones(N, device=GPU)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total = x + 1
    if is_right:
        torch.cuda.current_stream().wait_stream(stream)
    x.fill_(7)
    torch.cuda.current_stream().wait_stream(stream)
    total.record_stream(torch.cuda.current_stream())
    return bool((total == 2).all())


def free_without_record_stream(is_right: bool) -> bool:
    stream, x = torch.cuda.Stream(), torch.ones(N, device=GPU)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total = x + 1
    if is_right:
        x.record_stream(stream)
    del x
    _ = torch.full((N,), 7.0, device=GPU)
    torch.cuda.current_stream().wait_stream(stream)
    total.record_stream(torch.cuda.current_stream())
    return bool((total == 2).all())


def read_on_the_host_too_early(is_right: bool) -> bool:
    x = torch.ones(N, device=GPU) * 5
    copy = torch.empty(N, pin_memory=True).copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if is_right:
        event.synchronize()
    return bool((copy == 5).all())


def read_after_another_event(is_right: bool) -> bool:
    event = torch.cuda.Event()
    if not is_right:
        event.record()
    x = torch.ones(N, device=GPU) * 5
    copy = torch.empty(N, pin_memory=True).copy_(x, non_blocking=True)
    if is_right:
        event.record()
    event.synchronize()
    return bool((copy.numpy() == 5).all())


def overwrite_on_the_host_too_early(is_right: bool) -> bool:
    pinned = torch.ones(N).pin_memory()
    x = pinned.to(GPU, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if is_right:
        event.synchronize()
    pinned.numpy()[:] = 9
    return bool((x == 1).all())


MISTAKES: list[Callable[[bool], bool]] = [
    use_before_an_event,
    overwrite_before_an_event,
    free_without_record_stream,
    read_on_the_host_too_early,
    read_after_another_event,
    overwrite_on_the_host_too_early,
]


@POLICIES
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_is_reported_and_right_code_is_not(
    mistake: Callable[[bool], bool], policy: str
) -> None:
    for seed in range(5):
        simgpu.begin(policy, seed)
        assert mistake(True) and simgpu.reports() == []
        simgpu.begin(policy, seed)
        is_right = mistake(False)
        assert simgpu.reports(), "whatever the policy, and however lucky the timing"
        assert simgpu.reports()[0].startswith("race: ")
        if policy == "lazy":
            assert not is_right, "and the numbers are wrong"


def test_a_report_names_jobs_streams_tensors_and_lines() -> None:
    simgpu.begin()
    x = torch.ones(2, 3, device=GPU)
    simgpu.native.label("1F0")
    product = x * 3
    simgpu.native.label("2F0")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        product.sum()
    simgpu.native.label("")
    (report,) = simgpu.reports()
    here = r"at simgpu/test_device\.py:\d+ test_a_report_names"
    before = rf"write by mul of Float\[2, 3\] in \[1F0\] {here}\w+ on stream 0"
    now = rf"read by sum of Float\[2, 3\] in \[2F0\] {here}\w+ on stream \d+"
    where = rf"\(block of 24 bytes of stream 0, allocated in \[1F0\] {here}"
    assert re.match(rf"race: {before}  \|\|  {now}  {where}", report), report


def test_pinned_memory_is_reused_only_after_its_copy() -> None:
    for policy in simgpu.POLICIES:
        simgpu.begin(policy)
        x = torch.ones(N).pin_memory().to(GPU, non_blocking=True)
        torch.full((N,), 9.0).pin_memory()
        assert bool((x == 1).all()) and simgpu.reports() == []


def test_leaks_and_double_frees_are_reported() -> None:
    simgpu.begin()
    before = simgpu.live()
    simgpu.native.label("1F0")
    kept = torch.empty(123, device=GPU)
    simgpu.native.label("")
    (left,) = set(simgpu.live()) - set(before)
    assert re.match(r"492 bytes of \[1F0\] at simgpu/test_device\.py:\d+ test_", left)
    del kept
    assert simgpu.live() == before
    address = simgpu.native.allocate(64)
    simgpu.native.free(address)
    assert simgpu.reports() == []
    simgpu.native.free(address)
    (report,) = simgpu.reports()
    assert report.startswith("freed in [] what is not allocated: a block of 64 bytes")


def test_waits_of_the_host_are_counted_with_job_and_line() -> None:
    simgpu.begin()
    x = torch.ones(3, device=GPU)
    simgpu.native.label("0F0")
    x.sum().item()
    simgpu.native.label("")
    torch.cuda.synchronize()  # for nothing: the host knows that all is done
    assert {job for _, job, _ in simgpu.waits()} == {"0F0"}
    x += 1
    torch.cuda.synchronize()
    waits = {(what, job) for what, job, _ in simgpu.waits()}
    assert waits == {("item", "0F0"), ("the device", "")}
    with waits_are_errors(), pytest.raises(RuntimeError, match="synchronizing"):
        x.sum().item()


@POLICIES
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("lm", "sgd"), ("norms", "AdamW fused"), ("dicts", "adamw")],
)
def test_numbers_are_those_of_the_cpu(model: str, optimizer: str, policy: str) -> None:
    case = Case(
        mode="FThenB", n_stages=1, model=model, optimizer=optimizer, clip=0.5,
        post_validation=False, device="cuda",
    )  # fmt: skip
    simgpu.begin(policy, seed=1)
    assert difference(run(case), plain(case), rounding=1e-4) is None
    assert simgpu.reports() == []
