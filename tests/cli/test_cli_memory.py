"""Memory in bytes on the command line: limits as 14GiB, figures and errors alike."""

import json
import re

import pytest

from zbpp.__main__ import main

SIZES = ["--stages", "2", "--microbatches", "4"]
GIB = 2**30


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "bytes.json"
    path.write_text(
        json.dumps(
            {
                "m_b": "1.5GiB",
                "m_w": "700MiB",
                "m_fixed": ["10GiB", "9 GiB"],
                "peak_b": "1GiB",
            }
        )
    )
    return ["--costs", str(path)]


def run(capsys, *flags):
    code = main(list(flags))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_limit_in_bytes_is_planned_for_and_shown(costs, capsys, tmp_path):
    flags = ["--pipeline_schedule_mode", "ZBV", *SIZES, *costs]
    _, text, _ = run(capsys, "show", *flags, "--memory_limit", "13GiB")
    assert re.search(r"peak memory +1[123]\.\d GiB\n", text)
    assert "within memory 13.0 GiB a stage" in text
    assert re.search(r"│ +1[012]\.\d GiB │", text)
    _, text, _ = run(capsys, "show", *flags, "--memory-limit", "13GiB", "--json")
    figures = json.loads(text)
    assert 12 * GIB < max(figures["peak_memory"]) <= 13 * GIB
    assert figures["memory_bound"] == 13 * GIB
    out = str(tmp_path / "plan.json")
    _, text, _ = run(capsys, "plan", *flags, "--out", out)
    assert re.search(r"peak memory 1\d\.\d GiB,", text)


def test_the_smallest_limit_is_told_in_bytes_and_works(costs, capsys):
    flags = ["show", "--pipeline_schedule_mode", "ZBV", *SIZES, *costs, "--json"]
    code, _, error = run(capsys, *flags, "--memory_limit", "9GiB")
    assert code == 2
    assert "on stage 0 (10.0 GiB of it fixed), over the limit 9.00 GiB" in error
    found = re.search(r"smallest limit that works is (\S+) GiB", error)
    assert found is not None
    assert run(capsys, *flags, "--memory_limit", f"{found[1]}GiB")[0] == 0
    less = float(found[1]) - 0.1
    assert run(capsys, *flags, "--memory_limit", f"{less}GiB")[0] == 2


def test_compare_prints_bytes(costs, capsys):
    code, text, _ = run(capsys, "compare", *SIZES, *costs, "--memory_limit", "14GiB")
    assert code == 0
    assert re.search(r"ZBH1 .* 1\d\.\d GiB", text)
