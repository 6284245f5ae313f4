"""The command as a function of its line, in a folder with files of costs."""

import json
from shlex import split

import pytest

from zbpp.cli import main

HEAD = {"f": [1, 1, 1, 1, 1, 1, 1, 3]}
"""Of eight layers, the last of which has a head that takes as long as two more."""
FILES = {
    "costs.json": {
        "f": 3, "b": 2, "w": 1, "comm": 0.5, "m_b": 4, "m_w": 1, "optimizer": 7,
    },
    "even.json": {"f": 1, "b": 1, "w": 1},
    "links.json": {"comm": [0.5], "loss": 0.25, "splits": [True, False]},
    "again.json": {"f": 1, "b": 1, "w": 1, "m_b": 1, "m_w": 0.5, "m_r": 0.05},
    "bytes.json": {
        "m_b": "1.5GiB",
        "m_w": "700MiB",
        "m_fixed": "9 GiB",
        "peak_b": "1GiB",
    },
    "gather.json": {"f": 2, "b": 2, "w": 2, "all_gather": 1.5, "reduce_scatter": 3},
    "layers.json": HEAD | {"n_layers": 8, "b": HEAD["f"], "w": HEAD["f"]},
    "mesh.json": {
        "n_layers": 8,
        "m_b": "0.5GiB",
        "m_w": "0.25GiB",
        "m_fixed": "16GiB",
        "parameters": "4GiB",
        "bandwidth": 8e9,
        "memory_limit": "60GiB",
    },
}  # fmt: skip


class Command:
    """Runs ``zbpp LINE`` in this process; ``out`` and ``err`` are of the last call."""

    def __init__(self, folder, capsys) -> None:
        self.folder, self.capsys = folder, capsys
        self.out = self.err = ""

    def __call__(self, line, *, code=0):
        self.capsys.readouterr()
        assert main(split(line)) == code, line
        self.out, self.err = self.capsys.readouterr()
        return self.out

    def json(self, line):
        return json.loads(self(f"{line} --json"))

    def files(self):
        found = {path.name for path in self.folder.iterdir() if path.is_file()}
        return found - FILES.keys()


@pytest.fixture
def zbpp(tmp_path, monkeypatch, capsys):
    for name, data in FILES.items():
        (tmp_path / name).write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return Command(tmp_path, capsys)
