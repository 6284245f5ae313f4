"""The table of kinds: rows that fit one another, and what is read of them."""

import dataclasses
import re

import pytest

from zbpp.core import (
    KINDS,
    Check,
    Collective,
    CollectiveKind,
    Costs,
    Lane,
    Pair,
    Pass,
    PassKind,
    Placement,
    Scope,
    State,
    Step,
    input_of,
    kind_of,
    members_of,
    output_of,
    parse_job,
    passes_in,
    reader,
    reads,
    stage_of,
    writes,
)

JOBS = [
    *(Pass(kind, 1, 2) for kind in PassKind),
    *(Collective(kind, 1) for kind in CollectiveKind),
    Step(1),
    Check(1),
    Pair(Pass(PassKind.F, 1, 2), Pass(PassKind.BW, 1, 0)),
]
TWO = Placement.single(2)


def test_there_is_a_row_for_every_kind_and_each_is_seen_here():
    assert [job.kind for job in JOBS] == list(KINDS)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_has_a_text_a_time_a_memory_and_a_stage(job):
    costs = Costs().on(TWO)
    work = [kind for part in members_of(job) for kind in kind_of(part).work]
    assert costs.of(job) == len(work), "a unit each of F, B and W"
    assert costs.peak(job) >= max(0.0, costs.change(job))
    assert stage_of(job, TWO) == 1
    assert parse_job(str(job), stage=1) == job
    assert re.sub(r"\(.*\)|\d", "", str(job)) == kind_of(job).text
    scope = kind_of(job).scope
    assert len(passes_in(job)) == {Scope.MICROBATCH: 1, Scope.PAIR: 2}.get(scope, 0)


def test_columns_are_those_of_the_costs():
    columns = {field.name for field in dataclasses.fields(Costs().on(TWO))}
    for row in KINDS.values():
        assert columns.issuperset(row.times)
        assert columns.issuperset(column for column, _ in row.keeps)
        assert row.peak is None or row.peak in columns
    assert not columns.issuperset(["m_c"])


@pytest.mark.parametrize("placement", [TWO, Placement.wave(2)])
def test_each_value_that_is_read_is_written_by_a_pass_that_sends_it_there(placement):
    n = placement.n_chunks
    passes = [Pass(kind, chunk, 0) for kind in PassKind for chunk in range(n)]
    written = {value: job.chunk for job in passes for value in writes(job, n)}
    for job in passes:
        for value in reads(job, n):
            assert written[value] == value.chunk and reader(value) == job.chunk
        assert input_of(job, n) in (None, *reads(job, n))
        assert output_of(job, n) in (None, *writes(job, n))
    assert any(value not in written for value in reads(Pass(PassKind.F, n, 0), n + 1))


def test_work_is_done_once_and_nothing_stays_behind_it():
    for whole in ((PassKind.F, PassKind.B, PassKind.W), (PassKind.F, PassKind.BW)):
        work = [work for kind in whole for work in KINDS[kind].work]
        assert work == [PassKind.F, PassKind.B, PassKind.W]
        kept = [sign for kind in whole for _, sign in KINDS[kind].keeps]
        assert sum(kept) == 0


def test_who_waits_for_what_is_started():
    for row in KINDS.values():
        assert row.is_async == (Lane.COMPUTE not in row.lanes) == (row.sets is not None)
        if row.sets is not None:
            assert any(row.sets in other.awaits for other in KINDS.values())
    assert State.PARAMETERS not in KINDS[PassKind.W].awaits
