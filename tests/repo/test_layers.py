"""Planning loads nothing heavy, and no file names one kind of accelerator.

`lint-imports` in `make check` checks which room of the package imports which; that the
commands load neither torch nor matplotlib, tests/cli/test_processes.py tests.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zbpp

ROOT = Path(zbpp.__file__).parent


def test_planning_and_simulating_load_neither_torch_nor_matplotlib():
    code = (
        "import sys, zbpp, zbpp.schedules, zbpp.simulator, zbpp.runtime\n"
        "print({'torch', 'matplotlib'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=200) == "set()\n"


def names_of_cuda(source):
    """What runs for CUDA alone: its module, its tensors, and comparisons with it."""
    if "cuda" not in source and "nccl" not in source:
        return  # most files: nothing to parse
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if text == "torch.cuda" or text.endswith(".is_cuda"):
            yield text
        if isinstance(node, ast.Compare):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and part.value in ("cuda", "nccl"):
                    yield ast.unparse(node)


def test_no_file_names_cuda_where_any_accelerator_can_be_asked_for():
    for path in ROOT.rglob("*.py"):
        assert not [*names_of_cuda(path.read_text(encoding="utf-8"))], path


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "x.is_cuda",
        'd.type in ("cpu", "cuda")',
        'b != "nccl"',
    ],
)
def test_a_line_for_cuda_alone_is_found(line):
    assert [*names_of_cuda(line)]
    assert not [*names_of_cuda('device.type == "cpu"; torch.accelerator.synchronize()')]
