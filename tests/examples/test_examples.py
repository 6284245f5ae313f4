"""Examples run, and compute what their plain forms compute."""

import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import minimal_zb
import pytest
import torch
from torch import nn
from torchtitan_zbpp import module_names

from zbpp.core import LayerCosts, RequestError, write_schedule
from zbpp.planning import PlanRequest, make_plan, plan

ROOT = Path(__file__).parents[2]


# minimal_zb.py: the idea in one file, without zbpp.


def equal_on(name, skipped):
    jobs = [minimal_zb.job_of(cell) for cell in skipped.split()]
    return bool(minimal_zb.is_equal(torch.distributed.get_rank(), name, jobs))


@pytest.mark.dist
@pytest.mark.parametrize(("name", "job"), [("ZB-H1", "1W3"), ("ZB-V", "2W0")])
def test_minimal_zb_has_the_bits_of_a_plain_loop(pool, name, job):
    assert pool.run(equal_on, 2, name, "") == [True, True]
    assert pool.run(equal_on, 2, name, job) == [False, False]  # a W is left out
    page = (ROOT / "docs/concepts/minimal.md").read_text(encoding="utf-8")
    assert "$ python examples/minimal_zb.py\n" in page and name in page


@pytest.mark.parametrize("name", ["ZB-H1", "ZB-V"])
def test_the_pictures_of_minimal_zb_have_each_job_once_and_idle_as_promised(name):
    picture, placement = minimal_zb.SCHEDULES[name]
    stages = minimal_zb.parse(picture)
    microbatches = range(minimal_zb.N_MICROBATCHES)
    assert sorted(job for stage in stages for job in stage.values()) == sorted(
        (c, k, i) for c in range(len(placement)) for k in "BFW" for i in microbatches
    )
    for rank, stage in enumerate(stages):
        assert {placement[chunk] for chunk, _, _ in stage.values()} == {rank}
    idle = [max(stage) - min(stage) + 1 - len(stage) for stage in stages]
    assert idle == ([1, 0] if name == "ZB-H1" else [0, 0])
    early = minimal_zb.ZB_H1.replace(".   1F0 1B0", "1F0 .   1B0")
    with pytest.raises(ValueError, match=r"\(1, 'F', 0\) comes before \(0, 'F', 0\)"):
        minimal_zb.parse(early)


def test_minimal_zb_needs_torch_alone():
    text = (ROOT / "examples" / "minimal_zb.py").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported <= {*sys.stdlib_module_names, "torch"}
    assert len(text.splitlines()) <= 300


# qwen3_moe_experts.py: experts on 2 stages x 2 processes, and in one.


def experts_losses(folder, steps, mode):
    """Run the script as a process would; gives the losses that it prints."""
    import qwen3_moe_experts

    before = sys.argv
    flags = ("--steps", str(steps), "--mode", mode, "--folder", folder)
    sys.argv = ["qwen3_moe_experts.py", str(ROOT / "README.md"), *flags]
    try:
        with redirect_stdout(StringIO()) as printed:
            qwen3_moe_experts.main()
    finally:
        sys.argv = before
    return [float(x) for x in re.findall(r"loss ([\d.]+)", printed.getvalue())]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.dist
def test_experts_are_sharded_and_trained_as_in_one_process(pool, tmp_path):
    from zbpp.checkpoint import read_model

    shards, whole = str(tmp_path / "shards"), str(tmp_path / "whole")
    (losses, *others) = pool.run(experts_losses, 4, shards, 4, "ZBV")
    assert others == [[], [], []]
    assert losses == pytest.approx(experts_losses(whole, 4, "ZBH1"), abs=2e-6)
    assert len(losses) == 4 and losses[3] < losses[0]
    plain = read_model(whole)
    for name, value in read_model(shards).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-4)
    # each resumes from the other's checkpoint
    (losses, *_) = pool.run(experts_losses, 4, whole, 6, "ZBV")
    assert losses == pytest.approx(experts_losses(shards, 6, "1F1B"), abs=5e-6)


# torchtitan_zbpp.py; that its wrapped stages compute what autograd computes is in
# tests/split/test_torch_stage.py.


def layered(mode, n_layers, **more):
    costs = LayerCosts(n_layers=n_layers, f=(0.2, *(1.0,) * (n_layers - 2), 1.5))
    request = PlanRequest(schedule=mode, costs=costs, n_stages=2, **more)
    return make_plan(request).schedule


def test_module_names_of_torchtitan_follow_the_split(tmp_path):
    file = tmp_path / "plan.json"
    write_schedule(layered("1F1B", 5, n_microbatches=2, split=(3, 2)), file)
    assert module_names(file) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "norm", "lm_head"],
    ]
    write_schedule(plan("1F1B", n_stages=2, n_microbatches=2), file)
    with pytest.raises(RequestError, match="has no split"):
        module_names(file)


# replica_loader.py and pipeline_trainer.py: loaders of accelerate, a Trainer.


@pytest.mark.needs("accelerate")
def test_replicas_share_a_loader_and_stages_do_not():
    from replica_loader import replica_loader
    from torch.utils.data import DataLoader

    def batches(n_replicas, replica):
        place = SimpleNamespace(n_replicas=n_replicas, replica=replica)
        pipeline = SimpleNamespace(place=place, device=torch.device("cpu"))
        loader = DataLoader(torch.arange(24), batch_size=4)
        return [x.tolist() for x in replica_loader(loader, pipeline, rng_types=None)]

    whole = [list(range(at, at + 4)) for at in range(0, 24, 4)]
    assert batches(1, 0) == whole
    assert [batches(2, 0), batches(2, 1)] == [whole[::2], whole[1::2]]


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.needs("accelerate")
def test_trainer_arguments_that_a_pipeline_would_ignore_are_refused(tmp_path):
    from pipeline_trainer import PipelineTrainer
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", gradient_accumulation_steps=2
    )
    with pytest.raises(RequestError, match=r"steps=2\) has no effect.*n_microbat"):
        PipelineTrainer(nn.Linear(2, 2), arguments, pipeline={})
