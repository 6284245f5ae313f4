"""One hardware queue for all streams of a GPU: refused where stages may hang."""

import pytest

from zbpp.core import RequestError
from zbpp.modes import plan
from zbpp.pipeline.parallel import check_one_queue

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(("value", "n_warnings"), [("1", 1), ("32", 0), (None, 0)])
def test_it_is_warned_of(
    value: str | None, n_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = plan("1F1B", n_stages=4, n_microbatches=8)
    check_one_queue(schedule, (), {} if value is None else {NAME: value})
    assert len(caplog.records) == n_warnings
    assert all(NAME in record.getMessage() for record in caplog.records)


def test_it_is_refused_where_stages_may_wait_for_each_other() -> None:
    schedule = plan("ZBV", n_stages=4, n_microbatches=8)
    with pytest.raises(RequestError, match=f"{NAME} is 1.*ZBV.*stage . in .* waits"):
        check_one_queue(schedule, (), {NAME: "1"})
    check_one_queue(schedule, (), {NAME: "8"})
