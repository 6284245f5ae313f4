"""What torch does not document is there, or named."""

import pytest

from zbpp.runtime.support import private_names


@pytest.mark.slow  # loads the compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by torch
def test_this_torch_has_all_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_names.missing_names() == []
    gone = ("torch._C:_gone", "torch._gone:name", "torch.utils.hooks:RemovableHandle.x")
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", dict.fromkeys(gone, ""))
    assert private_names.missing_names() == list(gone)
