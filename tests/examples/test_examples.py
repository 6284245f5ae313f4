"""Examples run, and compute what their plain forms compute."""

import importlib.util
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zbpp.core import LayerCosts, RequestError, read_schedule, write_schedule
from zbpp.planning import PlanRequest, make_plan, plan
from zbpp.schedules import to_torch_csv

ROOT = Path(__file__).parents[2]


def load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, ROOT / f"examples/{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


# minimal_zb.py: the idea in one file, without zbpp.


def equal_on(name, skipped):
    import torch.distributed as dist

    module = load("minimal_zb")
    jobs = [module.job_of(cell) for cell in skipped.split()]
    return bool(module.is_equal(dist.get_rank(), name, jobs))


@pytest.mark.dist
@pytest.mark.parametrize(("name", "job"), [("ZB-H1", "1W3"), ("ZB-V", "2W0")])
def test_minimal_zb_has_the_bits_of_a_plain_loop(pool, name, job):
    assert pool.run(equal_on, 2, name, "") == [True, True]
    assert pool.run(equal_on, 2, name, job) == [False, False]  # a W is left out
    page = (ROOT / "docs/concepts/minimal.md").read_text(encoding="utf-8")
    assert "$ python examples/minimal_zb.py\n" in page and name in page


@pytest.mark.parametrize("name", ["ZB-H1", "ZB-V"])
def test_the_pictures_of_minimal_zb_have_each_job_once_and_idle_as_promised(name):
    module = load("minimal_zb")
    picture, placement = module.SCHEDULES[name]
    stages = module.parse(picture)
    microbatches = range(module.N_MICROBATCHES)
    assert sorted(job for stage in stages for job in stage.values()) == sorted(
        (c, k, i) for c in range(len(placement)) for k in "BFW" for i in microbatches
    )
    for rank, stage in enumerate(stages):
        assert {placement[chunk] for chunk, _, _ in stage.values()} == {rank}
    idle = [max(stage) - min(stage) + 1 - len(stage) for stage in stages]
    assert idle == ([1, 0] if name == "ZB-H1" else [0, 0])
    early = module.ZB_H1.replace(".   1F0 1B0", "1F0 .   1B0")
    with pytest.raises(ValueError, match=r"\(1, 'F', 0\) stands before \(0, 'F', 0\)"):
        module.parse(early)


def test_minimal_zb_needs_torch_alone():
    text = (ROOT / "examples" / "minimal_zb.py").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported <= {*sys.stdlib_module_names, "torch"}
    assert len(text.splitlines()) <= 300


# qwen3_moe_experts.py: experts on 2 stages x 2 processes, and in one.


def experts_losses(folder, steps, mode):
    """Run the script as a process would; gives the losses that it prints."""
    module, before = load("qwen3_moe_experts"), sys.argv
    flags = ("--steps", str(steps), "--mode", mode, "--folder", folder)
    sys.argv = ["qwen3_moe_experts.py", str(ROOT / "README.md"), *flags]
    try:
        with redirect_stdout(StringIO()) as printed:
            module.main()
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


# torchtitan_zbpp.py: a pipelining function, wrapped, runs our plan with our split.

BLOCKS, WIDTH, N_MICROBATCHES = 6, 8, 4


def layered(mode, n_layers, **more):
    costs = LayerCosts(n_layers=n_layers, f=(0.2, *(1.0,) * (n_layers - 2), 1.5))
    request = PlanRequest(schedule=mode, costs=costs, n_stages=2, **more)
    return make_plan(request).schedule


def language_model():
    """Modules by the names that torchtitan's language models use."""
    torch.manual_seed(0)
    blocks = {
        f"layers.{i}": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        for i in range(BLOCKS)
    }
    ends = {"norm": nn.LayerNorm(WIDTH), "lm_head": nn.Linear(WIDTH, 16)}
    return {"tok_embeddings": nn.Embedding(16, WIDTH), **blocks, **ends}


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 16, (2, 3 * N_MICROBATCHES), generator=generator)


def torch_pipeline(model, *, names, csv, placement):
    """Torch's own stages and schedule, put together as torchtitan does it."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    chunks = [c for c, stage in enumerate(placement) if stage == dist.get_rank()]
    parts = [nn.Sequential(*(model[name] for name in names[c])) for c in chunks]
    stages = [
        PipelineStage(part, chunk, len(placement), torch.device("cpu"))
        for chunk, part in zip(chunks, parts, strict=True)
    ]
    runtime = _PipelineScheduleRuntime(
        stages, N_MICROBATCHES, nn.functional.cross_entropy, scale_grads=False
    )
    runtime._load_csv(csv)
    return runtime, parts, 0 in chunks, len(placement) - 1 in chunks


def gradients(model):
    return {
        f"{name}.{inner}": p.grad
        for name, module in model.items()
        for inner, p in module.named_parameters()
        if p.grad is not None
    }


def run_titan(file, csv):
    """Gradients of one rank, and the number of products that its W's computed."""
    from matmuls import CountMatmuls

    example, model = load("torchtitan_zbpp"), language_model()
    pipelining = example.with_split_backward(torch_pipeline)
    placement = read_schedule(file).placement.stage_of
    names = example.module_names(file)
    runtime, parts, first, last = pipelining(
        model, names=names, csv=csv, placement=placement
    )
    products = CountMatmuls()
    for stage in runtime._stages:

        def counted(build=stage.dw_builder):
            run = build()

            def w():
                with products:
                    run()

            return w

        stage.dw_builder = counted
    inputs, targets = tokens()
    arguments = [inputs] if first else []
    runtime.step(*arguments, **({"target": targets, "losses": []} if last else {}))
    assert not any("module." in name for p in parts for name, _ in p.named_parameters())
    return gradients(model), products.count


@pytest.mark.dist
def test_a_wrapped_pipeline_of_torchtitan_gives_the_serial_gradients(pool, tmp_path):
    schedule = layered("ZBV", BLOCKS + 2, n_microbatches=N_MICROBATCHES)
    file, csv = tmp_path / "plan.json", tmp_path / "torch.csv"
    write_schedule(schedule, file)
    csv.write_text(to_torch_csv(schedule))
    parts = pool.run(run_titan, 2, str(file), str(csv))
    assert all(n_products > 0 for _, n_products in parts)
    found = {name: g for part, _ in parts for name, g in part.items()}
    model = language_model()
    whole = nn.Sequential(*model.values())
    for x, target in zip(*(t.chunk(N_MICROBATCHES) for t in tokens()), strict=True):
        nn.functional.cross_entropy(whole(x), target).backward()
    serial = gradients(model)
    assert found.keys() == serial.keys()
    assert all(torch.equal(found[name], g) for name, g in serial.items())


def test_module_names_of_torchtitan_follow_the_split(tmp_path):
    file = tmp_path / "plan.json"
    names_of = load("torchtitan_zbpp").module_names
    write_schedule(layered("1F1B", 5, n_microbatches=2, split=(3, 2)), file)
    assert names_of(file) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "norm", "lm_head"],
    ]
    write_schedule(plan("1F1B", n_stages=2, n_microbatches=2), file)
    with pytest.raises(RequestError, match="has no split"):
        names_of(file)


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
@pytest.mark.xdist_group("hf")
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
