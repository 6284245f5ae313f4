"""Which devices run ahead of the host, on a torch for CPUs and on played others."""

import pytest
import torch

from zbpp.cli import doctor
from zbpp.core import RequestError
from zbpp.runtime.support.devices import (
    accelerator,
    asked_device,
    built_for,
    check_kind,
    device_name,
    is_missing,
    runs_ahead,
)

CPU = torch.device("cpu")


def play(monkeypatch: pytest.MonkeyPatch, kind: str, *, is_there: bool) -> None:
    built = torch.device(kind)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: built)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: is_there)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mtia"])
@pytest.mark.parametrize("is_there", [False, True])
def test_the_accelerator_of_this_torch_runs_ahead(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_there: bool
) -> None:
    play(monkeypatch, kind, is_there=is_there)
    assert built_for() == kind and accelerator() == (kind if is_there else None)
    assert runs_ahead(torch.device(kind, 1)) and not runs_ahead(CPU)
    assert is_missing(torch.device(kind)) == (not is_there)
    assert is_missing(torch.device("hpu"))


def test_metal_runs_as_a_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "mps", is_there=True)
    metal = torch.device("mps")
    assert accelerator() is None and not runs_ahead(metal) and not is_missing(metal)


def test_without_an_accelerator_nothing_runs_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: None)
    assert accelerator() is built_for() is None
    assert not runs_ahead(torch.device("cuda")) and is_missing(torch.device("cuda"))
    assert not is_missing(CPU) and not is_missing(torch.device("meta"))


def test_a_device_without_a_product_has_the_name_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(monkeypatch, "xpu", is_there=True)
    monkeypatch.setattr("torch.xpu.get_device_name", lambda _: "Max 1550")
    assert device_name(CPU) == "cpu"
    assert device_name(torch.device("xpu", 0)) == "Max 1550"
    monkeypatch.delattr("torch.xpu.get_device_name")
    assert device_name(torch.device("xpu", 0)) == "xpu"


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:1", ""])
def test_a_kind_that_torch_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"choose auto, cpu, cuda or another"):
        check_kind(name)
    with pytest.raises(RequestError, match=r"choose cpu, cuda or another"):
        check_kind("auto", auto=False)
    for known in ("auto", "cpu", "cuda", "xpu", "hpu"):
        check_kind(known)


def test_doctor_names_the_accelerator_and_what_moves_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class About:
        name, total_memory = "Max 1550", 2**36

    play(monkeypatch, "xpu", is_there=True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    monkeypatch.setattr("torch.xpu.get_device_properties", lambda _: About)
    lines = doctor.report_lines()
    assert "accelerator    xpu, its messages by xccl" in lines
    assert "xpu 0          Max 1550, 64.0 GiB" in lines
    play(monkeypatch, "xpu", is_there=False)
    assert "accelerator    no xpu device visible" in doctor.report_lines()


def test_a_process_takes_its_own_device_of_the_kind_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(monkeypatch, "cuda", is_there=False)
    assert asked_device("auto").type == asked_device("cpu").type == "cpu"
    play(monkeypatch, "cuda", is_there=True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert str(asked_device("cuda")) == "cuda:1"
