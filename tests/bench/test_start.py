"""The words of a bench before its processes start, and when they have ended."""

import json

import pytest

from zbpp.bench import peers, run
from zbpp.bench.request import BenchRequest
from zbpp.core import RequestError, WorkerError

CONTENDERS = ("zbpp:1F1B", "torch:GPipe")


def request(folder) -> BenchRequest:
    return BenchRequest(
        contenders=CONTENDERS,
        stages=2,
        microbatches=4,
        load=lambda: pytest.fail("no process was started"),
        out=folder,
        command="",
    )


def lacks(name: str) -> object:
    raise ValueError(f"Unknown schedule name {name}")


def test_a_schedule_that_this_torch_lacks_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "_class_of", lacks)
    with pytest.raises(
        RequestError, match=r"torch:GPipe cannot run: torch \d.* has no"
    ):
        run.start_bench(request(tmp_path))


@pytest.mark.parametrize("same", [True, False, None])
def test_wrong_gradients_end_the_command(monkeypatch, tmp_path, same):
    def launch(worker, args, n, **_):
        assert (worker, args[0].out, n) == (run.run_bench, tmp_path, 2)
        found = [{"name": name, "same_gradients": True} for name in CONTENDERS]
        found[1] |= {"same_gradients": same, "reason": "off by 1.0e-03"}
        data = {"contenders": found, "reference": CONTENDERS[0]}
        (tmp_path / "results.json").write_text(json.dumps(data))

    monkeypatch.setattr(peers, "_class_of", lambda name: name)
    monkeypatch.setattr(run, "launch", launch)
    if same is not False:
        run.start_bench(request(tmp_path))
        return
    with pytest.raises(WorkerError, match=r"torch:GPipe \(off by 1\.0e-03\)"):
        run.start_bench(request(tmp_path))
