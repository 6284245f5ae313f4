"""The simulated device: every kind of mistake is reported, right code never is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_waits import waits_are_errors
from torch import Tensor, nn

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
    assert_matches(rf"race: {before}  \|\|  {now}  {where}", report)


def assert_matches(pattern: str, text: str) -> None:
    import re

    assert re.match(pattern, text), text


def test_pinned_memory_goes_back_when_it_has_been_read() -> None:
    for policy in simgpu.POLICIES:
        simgpu.begin(policy)
        x = torch.ones(N).pin_memory().to(GPU, non_blocking=True)
        torch.full((N,), 9.0).pin_memory()
        assert bool((x == 1).all()) and simgpu.reports() == []


def test_what_is_never_freed_and_what_is_freed_twice_is_told() -> None:
    simgpu.begin()
    before = simgpu.live()
    simgpu.native.label("1F0")
    kept = torch.empty(123, device=GPU)
    simgpu.native.label("")
    (left,) = set(simgpu.live()) - set(before)
    assert_matches(
        r"492 bytes of \[1F0\] at simgpu/test_device\.py:\d+ test_what", left
    )
    del kept
    assert simgpu.live() == before
    native = simgpu.native
    address = native.allocate(64)
    native.free(address)
    assert simgpu.reports() == []
    native.free(address)
    (report,) = simgpu.reports()
    assert_matches(r"freed in \[\] what is not allocated: a block of 64 bytes", report)


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


def test_the_host_runs_ahead_until_it_must_wait() -> None:
    simgpu.begin("lazy")
    x = torch.ones(3, device=GPU)
    x += 1
    event = torch.cuda.Event()
    event.record()
    assert not event.query() or event.query(), "asking waits for nothing"
    assert simgpu.waits() == {}
    event.synchronize()
    assert event.query() and x.tolist() == [2.0, 2.0, 2.0]


# ---- What the tests' models need of torch: the same numbers as on the CPU.


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in self.mixed(x).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv net": (conv_net, (2, 3, 16, 16)),
    "attention": (Attention, (2, 5, 8)),
}


def gradients(make: Callable[[], nn.Module], shape: Any, device: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = make().to(device)
    x = torch.randn(shape).to(device).requires_grad_()
    model(x).square().mean().backward()
    return [one.cpu() for one in (x.grad, *(p.grad for p in model.parameters()))]


@POLICIES
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_gradients_of_the_cpu(name: str, policy: str) -> None:
    make, shape = MODELS[name]
    simgpu.begin(policy, seed=1)
    for here, there in zip(
        gradients(make, shape, GPU), gradients(make, shape, "cpu"), strict=True
    ):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-7)
    assert simgpu.reports() == []


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_step_as_on_the_cpu(
    kind: type[torch.optim.Optimizer], how: dict[str, bool]
) -> None:
    def stepped(device: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8).to(device)
        optimizer: Any = kind(model.parameters(), lr=0.1, **how)
        for _ in range(3):
            model(torch.ones(2, 8, device=device)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    simgpu.begin("random", seed=2)
    for here, there in zip(stepped(GPU), stepped("cpu"), strict=True):
        torch.testing.assert_close(here, there)
    assert simgpu.reports() == []


def test_random_numbers_follow_the_seed_alone() -> None:
    drawn = []
    for policy in simgpu.POLICIES:
        simgpu.begin(policy)
        torch.cuda.manual_seed(5)
        x = torch.rand(4, device=GPU)
        state = torch.cuda.get_rng_state()
        mask = nn.functional.dropout(torch.ones(50, device=GPU), 0.5)
        torch.cuda.set_rng_state(state)
        again = nn.functional.dropout(torch.ones(50, device=GPU), 0.5)
        assert torch.equal(mask, again)
        drawn.append(torch.cat([x, mask]).tolist())
    assert drawn[0] == drawn[1] == drawn[2]


def test_views_and_strides_reach_the_same_bytes() -> None:
    simgpu.begin("random")
    x = torch.arange(24.0, device=GPU).view(4, 6)
    x.t()[1:3, ::2].mul_(2)
    x[1].copy_(x[2, torch.arange(5, -1, -1, device=GPU)])
    expected = torch.arange(24.0).view(4, 6)
    expected.t()[1:3, ::2].mul_(2)
    expected[1].copy_(expected[2, torch.arange(5, -1, -1)])
    assert torch.equal(x.cpu(), expected) and simgpu.reports() == []


def test_one_seed_gives_one_run() -> None:
    def run(seed: int) -> int:
        simgpu.begin("random", seed)
        stream, events = torch.cuda.Stream(), []
        for _ in range(20):
            x = torch.ones(N, device=GPU) * 2
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x.record_stream(stream)
                x.sum()
                events.append(torch.cuda.Event())
                events[-1].record()
            [event.query() for event in events]
        return simgpu.digest()

    assert run(1) == run(1)
    assert run(1) != run(2), "the control: what the host is told differs"
