"""A training is planned once, wherever it is started."""

import pytest

from zbpp.modes import plan
from zbpp.training import start as starting
from zbpp.training.options import Train


@pytest.fixture
def plans(monkeypatch):
    made = []

    def count(*args, **request):
        made.append(plan(*args, **request))
        return made[-1]

    monkeypatch.setattr("zbpp.training.setup.plan", count)
    return made


def test_the_plan_that_is_checked_is_handed_on(monkeypatch, plans):
    handed = []
    monkeypatch.setattr(
        starting, "launch", lambda _, args, *__, **___: handed.append(args)
    )
    starting.start(Train(steps=1))
    (schedule,) = plans
    assert [args[1] for args in handed] == [schedule]


def test_a_process_of_torchrun_plans_once(monkeypatch, plans):
    handed = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(starting, "train", lambda *args: handed.append(args))
    monkeypatch.setattr(starting.os, "_exit", lambda code: handed.append(code))
    starting.start(Train(steps=1))
    (schedule,) = plans
    assert handed[0][1] is schedule and handed[1] == 0
