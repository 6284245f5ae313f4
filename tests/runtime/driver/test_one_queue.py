"""One hardware queue for all streams of a GPU is refused: stages may hang."""

import pytest

from zbpp.core import RequestError
from zbpp.pipeline.parallel import check_one_queue

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


def test_it_is_refused() -> None:
    with pytest.raises(RequestError, match=f"{NAME} is 1: .*; leave .* unset"):
        check_one_queue({NAME: "1"})
    check_one_queue({NAME: "8"})
    check_one_queue({})
