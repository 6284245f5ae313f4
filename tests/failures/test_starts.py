"""What is wrong on one rank at the start stops all ranks, with the same line on each.

Each row of `REFUSED` runs on as many ranks as it says; rows of as many share a launch.
"""

import copy
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as f

import zbpp

WIDTH, N_LAYERS = 8, 8
Row = tuple[int, Callable[[], object], str]
"""Ranks, what they call, a pattern of the line that all of them raise."""


def linears(n: int = N_LAYERS) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(n)]


def make(model: Any = None, mode: Any = "1F1B", **more: Any) -> zbpp.Pipeline:
    settings: dict[str, Any] = {
        "loss_fn": f.mse_loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "n_microbatches": 4,
        "device": "cpu",
        "execution": zbpp.Execution(timeout_s=60),
    }
    return zbpp.Pipeline(linears() if model is None else model, mode, **settings | more)


def last_has(wrong: Any, right: Any) -> Any:
    """A value that is wrong on the last rank alone."""
    return wrong if dist.get_rank() == dist.get_world_size() - 1 else right


# ---- Layers, optimizers and arguments of one rank.


def with_last(layer: Callable[[], Any]) -> Any:
    """Layers of which the last one, on the last rank, is built by a function."""

    def build(indices: range) -> list[nn.Module]:
        layers = linears()[indices.start : indices.stop]
        return [*layers[:-1], layer()] if indices.stop == N_LAYERS else layers

    return zbpp.layers_from(build, n_layers=N_LAYERS)


def lost() -> nn.Module:
    raise FileNotFoundError("weights-7.bin")


def optimizer_of_one(named_parameters: list[tuple[str, nn.Parameter]]) -> Any:
    if "layers.7.weight" in dict(named_parameters):
        return "adamw"
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


def chooses(pattern: str) -> Callable[[Any], list[Any]]:
    def build(named_parameters: list[tuple[str, nn.Parameter]]) -> list[Any]:
        chosen = [p for name, p in named_parameters if pattern in name]
        return [torch.optim.SGD(chosen, lr=0.1)] if chosen else []

    return build


class Uncut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linears(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


OF_ONE_RANK: dict[str, Row] = {
    "no module": (2, lambda: make(with_last(lambda: torch.relu)), "layer 7 is"),
    "on meta": (
        2,
        lambda: make(with_last(lambda: nn.Linear(8, 8, device="meta"))),
        "layers.7.weight is on the meta device",
    ),
    "an optimizer's name": (
        2,
        lambda: make(optimizer=optimizer_of_one),
        "the optimizer's builder gave a str",
    ),
    "nothing is stepped": (
        2,
        lambda: make(optimizer=chooses("block.")),
        "optimizer= steps none of the 16 parameters",
    ),
    "an argument": (
        2,
        lambda: make(n_microbatches=last_has(0, 4)),
        "n_microbatches is 0",
    ),
    "a file": (
        2,
        lambda: make(mode=last_has("/nowhere/plan.json", "ZBH1")),
        "/nowhere/plan.json",
    ),
    "a model": (2, lambda: make(last_has(Uncut(), None)), "cannot be cut into layers"),
    "another mode": (
        2,
        lambda: make(mode=last_has("ZBH1", "1F1B")),
        "different schedules, splits or settings",
    ),
}


# ---- Layers that each rank builds for itself.


def unseeded(indices: range) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in indices]


def reseeded(indices: range) -> list[nn.Module]:
    torch.manual_seed(0)
    return unseeded(indices)


def seeded_by_index(indices: range) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for index in indices:
        torch.manual_seed(index)
        layers.append(nn.Linear(WIDTH, WIDTH))
        layers[-1].log = nn.Parameter(torch.arange(1.0, 9.0))  # the same in all layers
    return layers


def copies(indices: range) -> list[nn.Module]:
    """All layers are meant to begin as copies of one."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    return [copy.deepcopy(layer) for _ in indices]


def tied() -> list[nn.Module]:
    torch.manual_seed(0)
    table, head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
    head.weight = table.weight
    return [table, *(nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS - 2)), head]


def tied_by_call(indices: range) -> list[nn.Module]:
    return tied()[indices.start : indices.stop]


def tied_by_layer(indices: range) -> list[nn.Module]:
    return [tied()[index] for index in indices]


def word_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return f.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def built(build: Any, mode: str = "1F1B", ties: Any = (), **more: Any) -> zbpp.Pipeline:
    torch.manual_seed(0)
    layers = zbpp.layers_from(build, n_layers=N_LAYERS, ties=ties)
    return make(layers, mode, loss_fn=word_loss, **more)


SEED = re.escape("torch.manual_seed(seed + index)")
TIE = re.escape("ties=[((0, 'weight'), (7, 'weight'))]")
OF_BUILDERS: dict[str, Row] = {
    "unseeded": (2, lambda: built(unseeded), SEED),
    "unseeded, ZBV": (2, lambda: built(unseeded, "ZBV"), SEED),
    "reseeded": (2, lambda: built(reseeded, "VPP"), SEED),
    "a tie": (2, lambda: built(tied_by_call), TIE),
    "a tie, by layer": (2, lambda: built(tied_by_layer), TIE),
    "a tie, in one process": (
        0,
        lambda: built(tied_by_call, n_stages=2),
        "share a parameter",
    ),
    "a tie, by layer, in one process": (
        0,
        lambda: built(tied_by_layer, n_stages=2),
        TIE,
    ),
}


# ---- Samples.


def read(
    differ: Iterable[str] = (),
    since: int = 0,
    *,
    dim: str = "pp",
    late: bool = False,
    parts: bool = False,
    key: Callable[[Tensor], Any] | None = None,
    alone: bool = False,
    strided: bool = False,
    mesh: dict[str, int] | None = None,
    mode: str = "ZBH1",
) -> None:
    """Train on batches that differ between ranks.

    Args:
        differ: of ``"inputs"``, ``"targets"`` and ``"key"``, what does.
        since: the first step in which it does.
        dim: of the mesh, along which it does.
        late: steps are validated in the next one.
        parts: a step is two calls.
        key: makes the key of a step; None: there is none.
        alone: each rank is given only what it reads.
        strided: batches are not contiguous.
        mesh: sizes; None: two stages.
        mode: of the schedule.
    """
    processes = zbpp.mesh(stages=2, **mesh) if mesh else None
    rank = dist.get_rank() if processes is None else processes.get_local_rank(dim)

    def draw(number: int, name: str) -> Tensor:
        number += 100 * (number >= since and rank == 1 and name in differ)
        seed = torch.Generator().manual_seed(2 * number + (name == "targets"))
        x = torch.randn(WIDTH, 16, generator=seed).t()
        return x if strided else x.contiguous()

    def batch(number: int) -> tuple[list[Tensor | None], dict[str, Any]]:
        both = [draw(number, "inputs"), draw(number, "targets")]
        here = [x if not alone or rank == i else None for i, x in enumerate(both)]
        number += 100 * (number >= since and rank == 1 and "key" in differ)
        return here, {} if key is None else {"key": key(torch.arange(16) + 16 * number)}

    def take(pipeline: zbpp.Pipeline, number: int) -> None:
        both, keys = batch(number)
        if not parts:
            pipeline.step(*both, **keys)
            return
        first, first_keys = batch(-1)
        pipeline.forward_backward(*first, n_calls=2, **first_keys)
        pipeline.forward_backward(*both, n_calls=2, **keys)
        pipeline.optim_step()

    policy = zbpp.StepPolicy(post_validation=True if late else None)
    with make(mode=mode, mesh=processes, step=policy) as pipeline:
        parameters = [p for _, p in pipeline.named_parameters()]
        for number in range(since + 3 if differ else 2):
            if number == since:
                pipeline.synchronize()
                before = [p.detach().clone() for p in parameters]
            try:
                take(pipeline, number)
            except zbpp.RequestError:
                assert number == since + late
                assert all(map(torch.equal, parameters, before)), "a step was taken"
                raise


BOTH, ALL = ("inputs", "targets"), ("inputs", "targets", "key")
TP, DP = {"tensor_parallel": 2}, {"data_parallel": 2}
SAMPLER = "first and the last stage read other samples in step {}, .*Sampler"
OF_SAMPLES: dict[str, Row] = {
    "both": (2, lambda: read(BOTH, mode="1F1B"), SAMPLER.format(0)),
    "both, later": (2, lambda: read(BOTH, 5), SAMPLER.format(5)),
    "both, strided": (2, lambda: read(BOTH, 4, strided=True), SAMPLER.format(4)),
    "both, validated late": (2, lambda: read(BOTH, 3, late=True), SAMPLER.format(3)),
    "both, in parts": (2, lambda: read(BOTH, 1, parts=True), SAMPLER.format(1)),
    "keys": (2, lambda: read(ALL, 3, alone=True, key=torch.clone), SAMPLER.format(3)),
    "keys in lists": (
        2,
        lambda: read(ALL, 3, alone=True, key=Tensor.tolist, late=True),
        SAMPLER.format(3),
    ),
    "keys, in parts": (
        2,
        lambda: read(ALL, 1, alone=True, key=torch.clone, parts=True),
        SAMPLER.format(1),
    ),
    "keys alone": (2, lambda: read(("key",), 2, key=torch.clone), SAMPLER.format(2)),
    "a key of letters": (
        2,
        lambda: read(key=lambda _: ["a", "b"]),
        "key is a list; give the numbers of the samples",
    ),
    "along tp": (
        4,
        lambda: read(BOTH, dim="tp", mesh=TP),
        "ranks 0 and 1 are neighbours along 'tp' and read other inputs",
    ),
    "targets along tp": (
        4,
        lambda: read(("targets",), dim="tp", mesh=TP),
        "ranks 2 and 3 are neighbours along 'tp' and read other targets",
    ),
}


# ---- Replicas that start differently. They are to be given equal weights instead.


def begin(
    dim: str,
    change: Callable[[Tensor], Tensor] = lambda x: x + 1e-6,
    loads: bool = False,
    **options: Any,
) -> None:
    """Train where a weight differs along a dimension, unless it is loaded later."""
    mesh = zbpp.mesh(stages=2, **(DP if dim == "dp" else TP))
    layers = linears()
    weight = layers[1].weight.detach().clone()
    if mesh.get_local_rank(dim) == 1:
        layers[1].weight.data = change(weight)
    processes = zbpp.DataParallel(mesh=mesh, **options)
    with make(layers, "ZBH1", mesh=processes) as pipeline:
        p: Any = dict(pipeline.named_parameters()).get("layers.1.weight")
        if loads and p is not None:
            if hasattr(p, "to_local"):
                p, weight = p.to_local(), weight.chunk(2)[mesh.get_local_rank("dp")]
            p.data.copy_(weight)
        for _ in range(2):
            pipeline.step(torch.ones(8, WIDTH), torch.ones(8, WIDTH))


REPLICAS = (
    r"layers\.1\.weight: parameters that differ between the replicas on ranks 0 and 1"
)
OF_REPLICAS: dict[str, Row] = {
    "one bit": (4, lambda: begin("dp"), REPLICAS + ".* mesh="),
    "other rows": (4, lambda: begin("dp", lambda x: x.flip(0)), REPLICAS),
    "one bit, optimizer": (4, lambda: begin("dp", shard="optimizer"), REPLICAS),
    "one bit, parameters": (4, lambda: begin("dp", shard="parameters"), REPLICAS),
    "along tp": (
        4,
        lambda: begin("tp"),
        r"layers\.1\.weight: plain parameters that differ .* 'tp', .*DTensors",
    ),
}


# ---- Meshes, wrapped layers and experts.


def wrapped(how: str, *, with_mesh: bool = False) -> zbpp.Pipeline:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    mesh = zbpp.mesh(stages=2, data_parallel=2)
    if how == "ddp":
        ddp = nn.parallel.DistributedDataParallel
        layers = [ddp(x, process_group=mesh.get_group("dp")) for x in linears()]
    else:
        wrap = fully_shard if how == "fsdp" else replicate
        layers = [wrap(x, mesh=mesh["dp"]) for x in linears()]
    return make(layers, mesh=mesh) if with_mesh else make(layers, n_stages=4)


def on_mesh(**options: Any) -> zbpp.Pipeline:
    n_stages = options.pop("n_stages", None)
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    return make(mesh=zbpp.DataParallel(mesh=mesh, **options), n_stages=n_stages)


def other_names() -> zbpp.Pipeline:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "xp"))
    return make(mesh=mesh)


def experts(
    mesh: Any,
    over: str = "ep",
    change: Callable[[Any, Any], object] = lambda model, mesh: None,
    **options: Any,
) -> None:
    """Start and step a model of experts over a dimension of a mesh."""
    from mesh_model import Model
    from meshes import is_expert, loss_fn

    model = Model(mesh, experts_over=over)
    change(model, mesh)
    named = {"expert_parameters": is_expert} | options
    processes = zbpp.DataParallel(mesh=mesh, **named)
    with make(model.layers(), mesh=processes, loss_fn=loss_fn) as pipeline:
        words = torch.arange(64).view(8, 8) % 16
        pipeline.step(words, words)


def ep_mesh(**sizes: int) -> Any:
    return zbpp.mesh(**{"stages": 2, "expert_parallel": 2} | sizes)


def one_more(model: Any, _: Any) -> None:
    if model.blocks[3].experts.group.rank() == 1:
        model.blocks[3].experts.more = nn.Parameter(torch.zeros(2, 1))


def one_of_all(model: Any, _: Any) -> None:
    bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model.blocks[3].experts.bias = bias


def wrap_over(dim: str, model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers():
        fully_shard(layer, mesh=mesh[dim])


def misordered() -> Any:
    names = ("ep", "dp")
    return dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


OF_MESHES: dict[str, Row] = {
    "size": (4, lambda: zbpp.mesh(stages=3), "there are 4; start as many"),
    "stages": (4, lambda: on_mesh(n_stages=4), "give it a dimension 'pp' of 4"),
    "shard": (
        4,
        lambda: on_mesh(shard="all"),
        "choose one of 'none', 'optimizer'",
    ),
    "buffers of layers that stay whole": (
        4,
        lambda: on_mesh(shard="gradients", alternating_buffers=True),
        "shard='parameters'",
    ),
    "ddp": (4, lambda: wrapped("ddp", with_mesh=True), "wrap them by `replicate`"),
    "fully_shard without a mesh": (4, lambda: wrapped("fsdp"), "mesh=mesh"),
    "replicate without a mesh": (4, lambda: wrapped("replicate"), "mesh=mesh"),
    "names": (4, other_names, r"a pipeline knows \('pp', 'dp'"),
    "experts over dp": (
        4,
        lambda: experts(zbpp.mesh(stages=2, data_parallel=2), "dp"),
        r"layers\.4\.experts\.gate_up_proj, .*: parameters that differ between the "
        "replicas .* expert_parallel=.* expert_parameters=lambda",
    ),
    "experts without a name": (
        4,
        lambda: experts(ep_mesh(), expert_parameters=None),
        r"layers\.4\.experts\..* expert_parameters=lambda",
    ),
    "experts named wrongly": (
        4,
        lambda: experts(ep_mesh(), expert_parameters=lambda name, _: "rts2" in name),
        "expert_parameters names no parameter of the model",
    ),
    "experts of other names": (
        4,
        lambda: experts(ep_mesh(), change=one_more),
        r"layers\.4\.experts\.more.* none on \d and \(2, 1\) on rank \d",
    ),
    "experts in buffers": (
        4,
        lambda: experts(
            ep_mesh(stages=1, data_parallel=2),
            shard="parameters",
            alternating_buffers=True,
        ),
        "leave alternating_buffers out",
    ),
    "experts wrapped over ep": (
        4,
        lambda: experts(ep_mesh(), change=partial(wrap_over, "ep")),
        "wrapped over the ranks .* over no dimension",
    ),
    "wrapped over dp where there is cp": (
        4,
        lambda: experts(
            zbpp.mesh(stages=1, data_parallel=2, context_parallel=2),
            change=partial(wrap_over, "dp"),
        ),
        r"over \['dp', 'cp'\], .*shard=",
    ),
    "experts before dp": (
        4,
        lambda: experts(misordered(), shard="optimizer"),
        "'dp', which must stand before 'ep'",
    ),
    "experts beside others": (
        4,
        lambda: experts(
            ep_mesh(stages=1, data_parallel=2),
            change=one_of_all,
            shard="optimizer",
            expert_parameters=lambda name, _: name.endswith("_proj"),
        ),
        "gate_up_proj of a DealtExperts .* module of their own",
    ),
}

REFUSED = {
    **OF_ONE_RANK,
    **OF_BUILDERS,
    **{f"samples: {name}": row for name, row in OF_SAMPLES.items()},
    **{f"replicas: {name}": row for name, row in OF_REPLICAS.items()},
    **{f"meshes: {name}": row for name, row in OF_MESHES.items()},
}
FINE: dict[str, tuple[int, Callable[[], object]]] = {
    "seeded by index": (2, lambda: built(seeded_by_index)),
    "copies": (2, lambda: built(copies)),
    "seeded by index, in one process": (0, lambda: built(seeded_by_index, n_stages=2)),
    "equal samples": (2, lambda: read()),
    # augmented at random where they are read
    "other inputs": (2, lambda: read(("inputs",))),
    "other targets": (2, lambda: read(("targets",))),
    "others of the same samples": (2, lambda: read(BOTH, key=torch.clone)),
    "keys of what is read": (2, lambda: read(alone=True, key=torch.clone)),
    "nothing to compare": (2, lambda: read(BOTH, alone=True)),
    "one process reads both": (2, lambda: read(BOTH, mode="ZBV")),
    "equal replicas": (4, lambda: read(mesh=DP)),
    "other samples of replicas": (4, lambda: read(BOTH, dim="dp", mesh=DP)),
    "neighbours": (4, lambda: read(mesh=TP)),
    "loaded since": (4, lambda: begin("dp", loads=True)),
    "shards loaded since": (4, lambda: begin("dp", loads=True, shard="parameters")),
    "equal shards": (4, lambda: begin("dp", torch.clone, shard="gradients")),
}


def outcome(function: Callable[[], Any]) -> tuple[str, str]:
    """The error that a function raises, by class and words; empty: none."""
    try:
        function()
    except zbpp.RequestError as error:
        return "RequestError", str(error)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def outcomes(names: list[str]) -> list[tuple[str, str]]:
    rows: dict[str, Any] = REFUSED | FINE
    return [outcome(rows[name][1]) for name in names]


@pytest.mark.dist
@pytest.mark.parametrize("n", [0, 2, 4])
def test_all_ranks_are_refused_alike(pool: Pool, n: int) -> None:
    rows: dict[str, Any] = REFUSED | FINE
    names = [name for name, row in rows.items() if row[0] == n]
    by_rank = pool.run(outcomes, n, names) if n else [outcomes(names)]
    for name, *said in zip(names, *by_rank, strict=True):
        kind, text = said[0]
        assert set(said) == {(kind, text)}, name
        if name in FINE:
            assert not kind, (name, text)
            continue
        assert kind == "RequestError", (name, said)
        assert re.search(REFUSED[name][2], text), (name, text)
        assert "\n" not in text, name


def fail_on_last() -> tuple[str, str]:
    return outcome(lambda: make(with_last(lost)))


@pytest.mark.dist
def test_a_failure_of_one_rank_is_told_to_the_others(pool: Pool) -> None:
    """It is no mistake of a request: the rank has its error, others a `PeerError`."""
    (kind, text), (last, words) = pool.run(fail_on_last, 2)
    assert (last, words) == ("FileNotFoundError", "weights-7.bin")
    assert kind == "PeerError" and "rank 1 failed" in text and words in text


@pytest.mark.parametrize("mode", ["1F1B", "VPP", "ZBV"])
def test_one_process_draws_what_the_plain_model_draws(mode: str) -> None:
    pipeline = built(unseeded, mode, n_stages=2)
    torch.manual_seed(0)
    plain = nn.Sequential(*unseeded(range(N_LAYERS))).state_dict()
    state = pipeline.state_dict()["model"]
    assert len(state) == len(plain)
    assert all(torch.equal(state[f"layers.{name}"], x) for name, x in plain.items())


def test_a_mesh_of_one_process_needs_no_launcher() -> None:
    assert not dist.is_initialized()
    try:
        assert zbpp.mesh(stages=1).size() == 1
    finally:
        dist.destroy_process_group()
