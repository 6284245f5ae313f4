"""`torch.cuda` on the simulated device: what a CPU build has no functions for."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

_TOTAL_BYTES = 2**34
_native: Any = None
_properties = SimpleNamespace(
    name="simulated GPU", uuid="simulated-0", total_memory=_TOTAL_BYTES,
    major=9, minor=0, multi_processor_count=1, gcnArchName="",
)  # fmt: skip


class Stream(torch.Stream):
    """As `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> "Stream":
        if "stream_id" in ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device="cuda", priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and self.stream_id == other.stream_id


class Event:
    """As `torch.cuda.Event`: makes that of torch, which takes no subclass.

    Torch's functions read an event's memory, and do not ask what it is.
    """

    def __new__(  # type: ignore[misc]
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> torch.Event:
        return torch.Event("cuda:0", enable_timing=enable_timing)


def current_stream(device: Any = None) -> Stream:
    return _stream(_native.current_stream())


def default_stream(device: Any = None) -> Stream:
    return _stream(0)


def _stream(number: int) -> Stream:
    kind = torch._C._autograd.DeviceType.CUDA.value
    return Stream(stream_id=number, device_index=0, device_type=kind)


@contextmanager
def stream(to: torch.Stream | None) -> Iterator[None]:
    if to is None:
        yield
        return
    before = current_stream()
    torch.accelerator.set_stream(to)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def name_device(uuid: str) -> None:
    """Tell this process's device from those of others."""
    _properties.uuid = uuid


def install(native: Any) -> None:
    """Give `torch.cuda` its functions."""
    global _native
    _native = native
    functions: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": stream,
        "set_stream": torch.accelerator.set_stream,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "synchronize": lambda device=None: native.synchronize(),
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: _properties,
        "get_device_name": lambda device=None: _properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "set_sync_debug_mode": _set_sync_debug_mode,
        "is_current_stream_capturing": lambda: False,
        "default_generators": (native.default_generator(),),
        "_initialized": True,  # torch's checkpoint saves the generator's state then
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    random: Any = torch.cuda.random
    random._lazy_init = lambda: None
    random.device_count, random.current_device = (lambda: 1), (lambda: 0)
    c: Any = torch._C
    c._cuda_getDeviceCount = lambda: 1
    c._cuda_synchronize = native.synchronize
    c._cuda_getCurrentRawStream = lambda device: native.current_stream()
    c._host_emptyCache = lambda *_: None
    storages: Any = torch.UntypedStorage
    resize_on_cpu = storages.resize_

    def resize(storage: Any, n_bytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize_on_cpu(storage, n_bytes)
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        native.resize_storage(whole, n_bytes)
        return storage

    storages.resize_ = resize


def _set_sync_debug_mode(mode: int | str) -> None:
    number = {"default": 0, "warn": 1, "error": 2}.get(str(mode), mode)
    _native.configure("sync_mode", float(number))


def install_nccl(native: Any) -> None:
    """Give `torch.distributed` the simulated NCCL."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    group: Any = native.ProcessGroupNCCL
    places: list[Any] = [dist, c10d]
    for place in places:
        place.ProcessGroupNCCL = group
    places[1]._NCCL_AVAILABLE = True
