"""Trainings with experts over ``ep`` and slices over ``cp``, and the same plainly."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

import zbpp
from zbpp.checkpoint.tensors import whole
from zbpp.runtime.optim import norms
from zbpp.runtime.optim.decision import clip_factor
from zbpp.runtime.parallel import bind
from zbpp.runtime.parallel.mesh import Place

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3_moe_experts.py"
WIDTH, TOKENS, WORDS, N_LAYERS, N_EXPERTS = 8, 8, 16, 8, 4
SAMPLES, N_MICROBATCHES, N_STEPS, CLIP = 16, 4, 20, 6.5

Found = SimpleNamespace
"""The outcome of a training: losses, norms, rollbacks, whole parameters."""


def example() -> Any:
    """The example's module, whose layer moves tokens to their experts."""
    if EXAMPLE.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[EXAMPLE.stem] = module
        spec.loader.exec_module(module)
    return sys.modules[EXAMPLE.stem]


class AllExperts(nn.Module):
    """The weights of all experts of a layer, as transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(N_EXPERTS, 2 * WIDTH, WIDTH) / 2)
        self.down_proj = nn.Parameter(torch.randn(N_EXPERTS, WIDTH, WIDTH) / 2)
        self.act_fn = nn.SiLU()


class Gathered(torch.autograd.Function):
    """Slices of a sequence, (samples, tokens, width), joined over a group."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


def deal(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a process's experts as DTensors, and use what is here of them."""
    names = [name for name, _ in experts.named_parameters()]
    for name in names:
        here = getattr(experts, name).detach()
        delattr(experts, name)
        dealt = nn.Parameter(DTensor.from_local(here, mesh, [Shard(0)]))
        experts.register_parameter(f"{name}_dealt", dealt)

    def use_local(module: Any, _: object) -> None:
        for name in names:
            vars(module)[name] = getattr(module, f"{name}_dealt").to_local()

    experts.register_forward_pre_hook(use_local)


class Block(nn.Module):
    """Attention to the whole sequence, then two of the experts for each token."""

    def __init__(self, ep: Any, cp: Any, *, dtensors: DeviceMesh | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, N_EXPERTS, bias=False)
        self.experts = example().DealtExperts(AllExperts(), ep)
        self.cp = cp
        if dtensors is not None:
            deal(self.experts, dtensors)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if self.cp is not None:
            k, v = (Gathered.apply(one, self.cp) for one in (k, v))
        x = x + (q @ k.transpose(1, 2)).softmax(-1) @ v
        rows = self.second_norm(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return x + self.experts(rows, chosen, weights).view_as(x)


def layers(
    ep: Any = None, cp: Any = None, *, dtensors: DeviceMesh | None = None
) -> list[nn.Module]:
    """Layers in 64 bits, the same on every process but for its experts."""
    torch.manual_seed(0)
    blocks = [Block(ep, cp, dtensors=dtensors) for _ in range(N_LAYERS - 2)]
    made = [nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)]
    return [layer.double() for layer in made]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and words to be told for some: more at the ends of the sequences."""
    generator = torch.Generator().manual_seed(100 + step)
    draw = partial(torch.randint, generator=generator)
    x, y = draw(WORDS, (SAMPLES, TOKENS)), draw(WORDS, (SAMPLES, TOKENS))
    counts = draw(8, (SAMPLES, TOKENS)) < torch.arange(1, TOKENS + 1)
    return x, torch.where(counts, y, -100)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return 3.0 * loss


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def is_expert(name: str, _: nn.Parameter) -> bool:
    return ".experts." in name


def pipeline_on(
    mode: str,
    sizes: dict[str, int],
    *,
    shard: Any = "none",
    dtensors: bool = False,
    broken: str | None = None,
    stages: int = 2,
    weigh: Any = "by default",
) -> zbpp.Pipeline:
    """A pipeline on a mesh of these sizes; some are without ``ep``."""
    if weigh == "by default":  # which counts tokens where there are slices
        weigh = None if "context_parallel" in sizes else "tokens"
    mesh = zbpp.mesh(stages=stages, **sizes)
    ep = mesh.get_group("ep") if sizes.get("expert_parallel", 1) > 1 else None
    cp = mesh.get_group("cp") if sizes.get("context_parallel", 1) > 1 else None
    with breaking(broken):
        return zbpp.Pipeline(
            layers(ep, cp, dtensors=mesh["ep"] if dtensors else None),
            mode,
            loss_fn=loss_fn,
            optimizer=optimizer,
            n_microbatches=N_MICROBATCHES,
            clip_grad_norm=CLIP,
            mesh=zbpp.DataParallel(
                mesh=mesh,
                shard=shard,
                expert_parameters=None if dtensors else is_expert,
            ),
            numerics=zbpp.Numerics(weigh=weigh),
            step=zbpp.StepPolicy(post_validation=True),
        )


def train(
    mode: str,
    sizes: dict[str, int],
    *,
    steps: int = N_STEPS,
    loads: str = "",
    saves: str = "",
    broken: str | None = None,
    profiles: bool = False,
    **how: Any,
) -> Found:
    """Train on a mesh up to a number of steps, from a checkpoint on if it is given."""
    pipeline = pipeline_on(mode, sizes, broken=broken, **how)
    with breaking(broken), pipeline:
        if loads:
            pipeline.load(loads)
        profile = None
        if profiles:
            profile = pipeline.profile(*share(pipeline, 0), rounds=5, most_s=0.01)
        results = [
            pipeline.step(*share(pipeline, step))
            for step in range(pipeline.n_steps, steps)
        ]
        if saves:
            pipeline.save(saves, wait=True)
        validation = pipeline.evaluate(*share(pipeline, 99))
        return Found(
            profile=profile,
            losses=[one.loss for one in results],
            norms=[one.grad_norm for one in results],
            rollbacks=sum(one.rollbacks for one in results),
            validation=validation,
            parameters=parameters_of(pipeline),
        )


def share(pipeline: zbpp.Pipeline, step: int) -> tuple[Tensor, Tensor]:
    """The part of a batch that this process reads."""
    place = pipeline.place

    def own(part: Tensor) -> Tensor:
        samples = part.chunk(place.n_replicas)[place.replica]
        return samples.chunk(place.n_sequence_slices, 1)[place.sequence_slice]

    x, y = batch(step)
    return own(x), own(y)


def parameters_of(pipeline: zbpp.Pipeline) -> dict[str, Tensor]:
    """This stage's parameters, those of all experts, by name."""
    state = pipeline.state_dict()["model"]
    return {
        name.replace("_dealt", ""): whole(value).clone()
        for name, value in state.items()
    }


def train_all(cases: list[tuple[str, dict[str, int], dict[str, Any]]]) -> list[Found]:
    return [train(mode, sizes, **more) for mode, sizes, more in cases]


def train_plainly(steps: int = N_STEPS) -> Found:
    """The same in one process, on all samples and tokens at once, by a plain loop."""
    model = nn.Sequential(*layers())
    stepper = optimizer(list(model.parameters()))
    losses, all_norms = [], []
    for step in range(steps):
        x, y = batch(step)
        loss = loss_fn(model(x), y)
        loss.backward()
        squares = [p.grad.square().sum() for p in model.parameters()]
        norm = float(torch.stack(squares).sum().sqrt())
        for p in model.parameters():
            p.grad *= clip_factor(norm, CLIP)
        losses.append(float(loss.detach()))
        all_norms.append(norm)
        stepper.step()
        stepper.zero_grad()
    x, y = batch(99)
    with torch.no_grad():
        validation = float(loss_fn(model(x), y))
    return Found(
        losses=losses,
        norms=all_norms,
        rollbacks=sum(norm > CLIP for norm in all_norms),
        validation=validation,
        parameters={f"layers.{n}": p.detach() for n, p in model.named_parameters()},
    )


def refusals() -> dict[str, str]:
    """What cannot be run on four processes, in the errors' words."""
    said = {}
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    said["over dp"] = refused(layers(mesh.get_group("dp")), mesh)
    mesh = zbpp.mesh(stages=2, expert_parallel=2)
    ep = mesh.get_group("ep")
    said["not named"] = refused(layers(ep), mesh, expert_parameters=None)
    said["named wrongly"] = refused(
        layers(ep), mesh, expert_parameters=lambda name, _: "expert." in name
    )
    odd = layers(ep)
    if mesh.get_local_rank("ep") == 1:
        odd[1].experts.more = nn.Parameter(torch.zeros(2, 1))
    said["other names"] = refused(odd, mesh)
    said["buffers"] = refused(
        layers(ep), mesh, shard="parameters", alternating_buffers=True
    )
    wrapped = [fully_shard(layer, mesh=mesh["ep"]) for layer in layers(ep)]
    said["wrapped over ep"] = refused(wrapped, mesh)
    mesh = zbpp.mesh(stages=1, data_parallel=2, context_parallel=2)
    wrapped = [fully_shard(layer, mesh=mesh["dp"]) for layer in layers()]
    said["wrapped over dp alone"] = refused(wrapped, mesh)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    ep = mesh.get_group("ep")
    said["order"] = refused(layers(ep), mesh, shard="optimizer")
    mesh = zbpp.mesh(stages=1, data_parallel=2, expert_parallel=2)
    mixed = layers(mesh.get_group("ep"))
    mixed[1].experts.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    said["mixed"] = refused(
        mixed,
        mesh,
        shard="optimizer",
        expert_parameters=lambda name, _: name.endswith("_proj"),
    )
    return said


def refused(made: list[nn.Module], mesh: DeviceMesh, **how: Any) -> str:
    """The error of a pipeline, or of its first step."""
    processes = {"mesh": mesh, "expert_parameters": is_expert, **how}
    try:
        pipeline = zbpp.Pipeline(
            made,
            loss_fn=loss_fn,
            optimizer=optimizer,
            n_microbatches=2,
            mesh=zbpp.DataParallel(**processes),
        )
    except zbpp.RequestError as error:
        return str(error)
    try:
        pipeline.step(*batch(0))
    except zbpp.RequestError as error:
        return str(error)
    finally:
        pipeline.close()
    return "nothing"


# Something taken out, as a negative control.


def _without(left_out: str, place: Place, kept: Any = ()) -> list[str]:
    return _sum_dims(place, (*kept, left_out))


_sum_dims = Place.sum_dims
BREAKS: dict[str, tuple[Any, str, Any]] = {
    "no sum over ep": (Place, "sum_dims", lambda p, kept=(): _without("ep", p, kept)),
    "no sum over cp": (Place, "sum_dims", lambda p, kept=(): _without("cp", p, kept)),
    "no sum over dp": (Place, "sum_dims", lambda p, kept=(): _without("dp", p, kept)),
    "experts summed over ep": (bind, "kept_dims", lambda p, plain: ()),
    "norm without ep": (norms, "EXPERT_DIM", "pp"),
}


@contextmanager
def breaking(what: str | None) -> Iterator[None]:
    """Break something in this process meanwhile."""
    if what is None:
        yield
        return
    owner, name, value = BREAKS[what]
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
