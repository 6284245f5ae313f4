"""Devices: what `zbpp doctor` says of accelerators, and which ones are refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from zbpp.core import RequestError

pytestmark = pytest.mark.needs("torch")


def play(patch: pytest.MonkeyPatch, kind: str, *, is_there: bool) -> None:
    """Let torch have an accelerator of this kind, with one device."""
    import torch

    about = SimpleNamespace(name="Max 1550", total_memory=2**36)
    patch.setattr("torch.accelerator.current_accelerator", lambda: torch.device(kind))
    patch.setattr("torch.accelerator.is_available", lambda: is_there)
    patch.setattr("torch.accelerator.device_count", lambda: int(is_there))
    patch.setattr(f"torch.{kind}.get_device_properties", lambda _: about, raising=False)


@pytest.mark.parametrize(
    ("kind", "is_there", "lines"),
    [
        (
            "xpu",
            True,
            [
                "accelerator    xpu, its messages by xccl",
                "xpu 0          Max 1550, 64.0 GiB",
            ],
        ),
        ("xpu", False, ["accelerator    no xpu device visible"]),
        ("mps", True, ["accelerator    none: torch is built for CPUs"]),
    ],
)
def test_doctor_names_the_accelerator(
    zbpp: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    is_there: bool,
    lines: list[str],
) -> None:
    play(monkeypatch, kind, is_there=is_there)
    assert set(lines) <= set(zbpp("doctor").splitlines())


@pytest.mark.slow  # loads the compiler
def test_doctor_names_what_this_torch_lacks(
    zbpp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "this torch lacks" not in zbpp("doctor")
    monkeypatch.delattr("torch._C._current_autograd_node")
    assert "this torch lacks torch._C:_current_autograd_node;" in zbpp("doctor")


def test_a_pipeline_on_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch import nn

    import zbpp

    play(monkeypatch, "xpu", is_there=False)
    with pytest.raises(RequestError, match="torch finds none here; see `zbpp doctor`"):
        zbpp.Pipeline(
            [nn.Linear(2, 2)],
            "1F1B",
            loss_fn=nn.functional.mse_loss,
            optimizer=None,
            n_stages=1,
            n_microbatches=2,
            device="xpu",
        )
