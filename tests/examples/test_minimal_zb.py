"""`examples/minimal_zb.py`: the idea in one file, without zbpp."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "minimal.md"
FILE = Path(__file__).parents[2] / "examples" / "minimal_zb.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_zb", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def equal_on(name: str, skipped: str) -> bool:
    """What one of the pool's processes finds."""
    import torch.distributed as dist

    module = load()
    skip = [module.job_of(cell) for cell in skipped.split()]
    return bool(module.is_equal(dist.get_rank(), name, skip))


@pytest.mark.dist
@pytest.mark.parametrize("name", ["ZB-H1", "ZB-V"])
def test_both_processes_have_the_bits_of_a_plain_loop(pool, name):
    assert pool.run(equal_on, 2, name, "") == [True, True]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "job"), [("ZB-H1", "1W3"), ("ZB-V", "2W0")])
def test_a_weight_pass_that_is_left_out_is_found(pool, name, job):
    assert pool.run(equal_on, 2, name, job) == [False, False]


@pytest.mark.parametrize("name", ["ZB-H1", "ZB-V"])
def test_the_pictures_have_each_job_once_and_idle_as_promised(name):
    module = load()
    picture, placement = module.SCHEDULES[name]
    stages = module.parse(picture)
    jobs = sorted(job for stage in stages for job in stage.values())
    counts = range(len(placement)), "BFW", range(module.N_MICROBATCHES)
    assert jobs == sorted(
        (c, k, i) for c in counts[0] for k in "BFW" for i in counts[2]
    )
    for rank, stage in enumerate(stages):
        assert {placement[chunk] for chunk, _, _ in stage.values()} == {rank}
    idle = [max(stage) - min(stage) + 1 - len(stage) for stage in stages]
    assert idle == ([1, 0] if name == "ZB-H1" else [0, 0])


def test_a_picture_in_which_a_job_stands_too_early_is_refused():
    module = load()
    early = module.ZB_H1.replace(".   1F0 1B0", "1F0 .   1B0")
    with pytest.raises(ValueError, match=r"\(1, 'F', 0\) stands before \(0, 'F', 0\)"):
        module.parse(early)


def test_it_can_be_read_in_one_sitting():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 300
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported <= {*sys.stdlib_module_names, "torch"}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--skip", "0W1"), 1)])
def test_the_script_starts_its_processes_and_tells_by_its_exit_code(flags, code):
    import subprocess

    command = [sys.executable, str(FILE), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == code, result.stderr
    page = PAGE.read_text(encoding="utf-8")
    assert f"$ python {' '.join(('examples/minimal_zb.py', *flags))}\n" in page
    assert result.stdout.splitlines()[0] in page
    words = ("equal to the last bit", "NOT EQUAL to a plain loop")[code]
    assert [line.endswith(words) for line in result.stdout.splitlines()] == [True] * 2
