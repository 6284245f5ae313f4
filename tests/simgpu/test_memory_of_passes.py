"""Bytes of passes by the device's own allocator are those of the estimate."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import simgpu
import zbpp
from zbpp import diagnostics
from zbpp.memory import layer_memory


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def test_measured_bytes_of_layers() -> None:
    simgpu.begin("lazy")
    layers = [
        nn.Sequential(nn.Linear(256, 256 * n), nn.GELU(), nn.Linear(256 * n, 256))
        for n in (1, 4, 1, 2)
    ]
    x = torch.randn(64, 256)
    estimated = layer_memory(layers, (x[:32], x[:32]), loss_fn, device="cuda")
    with zbpp.Pipeline(
        layers, "ZBH1", n_stages=2, n_microbatches=2, device="cuda",
        loss_fn=loss_fn, optimizer=torch.optim.AdamW,
    ) as pipeline:  # fmt: skip
        profile = diagnostics.profile(pipeline, x, x, rounds=1)
    assert profile.memory is not None
    for name, tolerance in dict(
        m_b=0.05, peak_f=0.05, peak_b=0.05, peak_w=0.05, m_w=0.3
    ).items():
        expected = pytest.approx(estimated.of(name), rel=tolerance)
        assert profile.memory[name] == expected, name
    planned = profile.with_memory(replace(estimated, m_b=0.0)).layers
    assert planned.m_b == profile.memory["m_b"]
    assert planned.m_fixed == estimated.m_fixed


def test_a_backward_is_counted_on_one_thread() -> None:
    """A thread of autograd could free tensors after the count."""
    simgpu.begin("lazy")
    threads = set()

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda _: threads.add(threading.get_ident()))
            return y

    layers = [Watched(8, 8) for _ in range(2)]
    x = torch.randn(4, 8)
    layer_memory(layers, (x, x), loss_fn, device="cuda")
    assert threads == {threading.get_ident()}
    threads.clear()
    y = nn.Sequential(*layers).to("cuda")(x.to("cuda"))
    y.sum().backward()
    assert threads - {threading.get_ident()}, "the device has a thread of its own"
