"""No kind of accelerator is named where `zbpp.runtime.support.devices` can be asked."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zbpp

ROOT = Path(zbpp.__file__).parent


def kinds_named(source: str) -> Iterator[str]:
    """What runs for CUDA alone: its module, its tensors, and comparisons with it."""
    if "cuda" not in source and "nccl" not in source:
        return  # most files: nothing to parse
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            yield "torch.cuda"
        if isinstance(node, ast.Compare):
            for one in ast.walk(node):
                if isinstance(one, ast.Constant) and one.value in ("cuda", "nccl"):
                    yield ast.unparse(node)


def test_no_file_names_cuda() -> None:
    found = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if [*kinds_named(path.read_text(encoding="utf-8"))]
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "x.is_cuda",
        'device.type == "cuda"',
        'dist.get_backend() != "nccl"',
        'd.type in ("cpu", "cuda")',
    ],
)
def test_it_would_be_seen(line: str) -> None:
    assert [*kinds_named(line)]
    assert not [*kinds_named('device.type == "cpu"; torch.accelerator.synchronize()')]
