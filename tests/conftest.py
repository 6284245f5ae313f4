"""Settings of all tests: seeds, hypothesis, and a header with the tested versions."""

import gc
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from pool import Pool

# It replaces CUDA in separate processes: `make test-simgpu`.
collect_ignore = [] if "simgpu" in sys.modules else ["simgpu"]

# One thread a process, in what tests start as well: the tests run side by side, and
# with other numbers of threads sums would have other orders.
os.environ["OMP_NUM_THREADS"] = "1"

# The processes that tests start shall compile the package once, not each for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No deadline: the machine may be busy. Derandomized: a failure can be repeated.
any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("zbpp", any_speed, derandomize=True, max_examples=25)
settings.register_profile("nightly", any_speed, derandomize=True, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "zbpp"))


def pytest_report_header() -> str:
    return f"zbpp {_version('zbpp')}, torch {_version('torch')}, device: {_device()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of what is an extra, such as torch, where it is not installed.

    Slow ones begin first, so that no worker is left with one at the end.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        for mark in item.iter_markers("needs"):
            (package,) = mark.args
            if importlib.util.find_spec(package) is None:
                reason = f"{package} is not installed"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure() -> None:
    """Look for no garbage while tests are imported: a sixth of that time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let no collection of garbage visit what is imported: torch is many objects."""
    gc.freeze()
    gc.enable()


TOGETHER = {
    "split/test_compiled.py": "compiler",
    "examples/test_frameworks.py": "hf",
    "models/test_families.py": "hf",
    "models/test_hugging_face.py": "hf",
    "models/test_weights.py": "hf",
    "training/test_hugging_face.py": "hf",
    "repo/test_site.py": "site",
    "repo/test_wheel.py": "wheel",
}
"""Files whose tests share one worker: they load, build or compile the same for long."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests out one by one, but for those files."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0].removeprefix("tests/")
            return TOGETHER.get(file, nodeid)

    return ByFile(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for distributed tests, one pool for all rooms."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    if "numpy" in sys.modules:  # not loaded here: most tests need neither
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        if torch.cuda.is_available():
            torch.manual_seed(0)
        else:  # manual_seed takes milliseconds to note that other devices are absent
            torch.default_generator.manual_seed(0)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _device() -> str:
    if importlib.util.find_spec("torch") is None:
        return "none"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
