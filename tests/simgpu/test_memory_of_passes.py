"""Bytes of passes on a device whose autograd has a separate thread."""

import threading

import torch
from torch import Tensor, nn

import simgpu
from zbpp.memory import layer_memory


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


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
    assert threads - {threading.get_ident()}, "the device has a separate thread"
