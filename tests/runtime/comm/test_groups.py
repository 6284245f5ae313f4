"""Groups of backends that this torch is built without, and how groups end."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zbpp.core import RequestError
from zbpp.runtime.comm.groups import Channel, Groups, open_group


class Played:
    """A backend's class, as torch has one each for NCCL and XCCL."""

    class Options:
        def __init__(self, *, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timedelta()

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.place, self.options = (rank, size), options


class World:
    def get_group_store(self) -> Any:
        return dist.HashStore()


def opened(monkeypatch: pytest.MonkeyPatch, backend: str) -> Any:
    monkeypatch.setattr(dist, "get_rank", lambda _: 5)
    base: Any = World()
    return open_group(base, [2, 5], "a name", backend=backend, timeout_s=3.0)


@pytest.mark.parametrize("backend", ["nccl", "xccl"])
def test_a_backend_of_torchs_own(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    name = f"ProcessGroup{backend.upper()}"
    monkeypatch.setattr(dist, name, Played, raising=False)
    group = opened(monkeypatch, backend)
    assert group.place == (1, 2) and group.options.is_high_priority_stream
    assert group.options._timeout == timedelta(seconds=6)


@pytest.mark.parametrize("extended", [False, True])
def test_a_backend_that_a_package_has_registered(
    monkeypatch: pytest.MonkeyPatch, extended: bool
) -> None:
    plugin = dist.Backend._BackendPlugin(lambda *given: given, extended)
    monkeypatch.setitem(dist.Backend._plugins, "HCCL", plugin)
    given = opened(monkeypatch, "hccl")
    if extended:
        about, options = given
        given = about.store, about.group_rank, about.group_size, about.timeout
        assert options is None
    assert given[1:] == (1, 2, timedelta(seconds=6))


def test_a_backend_that_nobody_has_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="torch knows no backend hccl"):
        opened(monkeypatch, "hccl")


class Noted:
    """A communicator that notes its end."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def shutdown(self) -> None:
        self._log.append(f"shut {self._name}")

    def abort(self) -> None:
        self._log.append(f"abort {self._name}")


def test_communicators_end_in_the_order_in_which_they_were_opened() -> None:
    log: list[str] = []
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1)]
    channels = {pair: Channel(Noted(str(pair), log), 0, 1) for pair in pairs}
    cpu = torch.device("cpu")
    groups = Groups(True, cpu, Noted("all", log), channels, dist.HashStore())
    groups.abort(cpu)
    groups.close()
    names = ["all", *map(str, pairs)]
    assert log == [f"abort {name}" for name in names] + [f"shut {x}" for x in names]
