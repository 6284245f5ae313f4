"""The words of a bench before its processes start, and when they have ended."""

import json
from math import inf

import pytest
import torch

from zbpp.bench import gradients, peers, results, run
from zbpp.bench.contender import Field, StepBatch
from zbpp.bench.request import BenchRequest
from zbpp.bench.turns import Turn
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


def test_the_page_shows_the_first_and_the_fastest(monkeypatch, tmp_path):
    """Of ours and of the others; the rest is shown when it is asked for."""
    pages = []
    monkeypatch.setattr(results.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(
        results, "write_page", lambda page, *_, **__: pages.append(page)
    )
    seconds = {"1F1B": 3, "ZBV": 1, "ZBH1": 2, "torch:GPipe": 5, "torch:1F1B": 4}
    outcomes = [
        results.Outcome(
            name if ":" in name else f"zbpp:{name}", None, (Turn((s,), (1,), (0,)),)
        )
        for name, s in seconds.items()
    ]
    batch = StepBatch([], [], 4, None)
    field = Field(request(tmp_path), torch.device("cpu"), batch)
    results.write_results(field, outcomes)
    (page,) = pages
    assert [one.name for one in page if one.shown] == ["1F1B", "ZBV", "torch:1F1B"]


def test_gradients_of_a_layer_that_should_have_none_are_infinitely_off(monkeypatch):
    monkeypatch.setattr(gradients, "gather", lambda thing: [thing])
    monkeypatch.setattr(gradients.dist, "get_rank", lambda: 0)
    found = [gradients.compare({}, {"layers.0.a": torch.full((2,), x)}) for x in (0, 1)]
    assert found == [0.0, inf]
