"""Wrapped stages train as the same model does that is wrapped and not cut."""

import pytest
import torch
from pool import Pool
from torch_scenarios import compare

MODES = {
    "replicate": "VPP",
    "plain": "ZBH1",
    "bf16": "ZBV",
    "resharded": "1F1B",
    "tensor parallel": "ZBV",
}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("how", MODES)
def test_a_pipeline_of_wrapped_layers_is_the_wrapped_model(
    how: str, pool: Pool
) -> None:
    rel = 2e-2 if how == "bf16" else 1e-5
    for at_rank in pool.run(compare, 4, [MODES[how]], [how]):
        assert len(at_rank) == 2
        for (results, own), (expected, parameters) in at_rank:
            assert len(results) == len(expected)
            for got, want in zip(results, expected, strict=True):
                assert got == pytest.approx(want, rel=rel)
            for name, value in own.items():
                torch.testing.assert_close(value, parameters[name], rtol=rel, atol=rel)
