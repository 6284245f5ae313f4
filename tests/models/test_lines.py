"""Lines that a user adds to a plain loop of their own: the whole script, compared."""

import difflib

import pytest
import torch
from tiny_hf import batch_of, tiny

pytest.importorskip("transformers")

PLAIN = """\
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in batches:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
"""

PIPELINED = """\
import zbpp
pipeline = zbpp.Pipeline(
    model,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    schedule="ZBV",
    n_stages=2,
    n_microbatches=4,
)
for batch in batches:
    losses.append(pipeline.step(batch).loss)
"""


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nine_lines_make_a_loop_a_pipeline(family):
    batches = [batch_of(family, 8, seed=seed) for seed in range(3)]
    found = {}
    for script in (PLAIN, PIPELINED):
        names = {"torch": torch, "model": tiny(family), "batches": batches}
        found[script] = names["losses"] = []
        exec(script, names)
    assert found[PIPELINED] == pytest.approx(found[PLAIN], rel=1e-5)
    lines = difflib.ndiff(PLAIN.splitlines(), PIPELINED.splitlines())
    assert sum(line.startswith("+ ") for line in lines) == 9
