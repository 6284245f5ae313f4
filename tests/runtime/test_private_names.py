"""The undocumented names of torch exist, or `zbpp doctor` names them."""

import pytest

from zbpp.cli import doctor
from zbpp.runtime.support import private_names


@pytest.mark.slow  # loads the compiler
def test_doctor_names_what_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> str:
        return "\n".join(doctor.report_lines())

    assert "this torch lacks" not in lines()
    gone = ("torch._C:_gone", "torch._gone:name", "torch.utils.hooks:RemovableHandle.x")
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", gone)
    assert f"this torch lacks {', '.join(gone)};" in lines()
