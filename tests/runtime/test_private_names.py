"""A release of torch that takes a name away is told of here first."""

import pytest

from zbpp.runtime.support.private_names import missing_names


@pytest.mark.slow  # loads the compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by torch
def test_this_torch_has_all_private_names() -> None:
    assert missing_names() == []
