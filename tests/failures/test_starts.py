"""What is wrong on one rank at the start stops all ranks, with the same line on each.

The rows of `REFUSED` and `FINE` are of two ranks, and of four; each launch runs all.
"""

import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

import zbpp

WIDTH, N_LAYERS = 8, 8
Row = tuple[Callable[[], object], str]
"""What ranks call, a pattern of the line that all of them raise."""


def linears() -> list[nn.Module]:
    return [*small.linears(N_LAYERS)]


def make(model: Any = None, mode: Any = "1F1B", **more: Any) -> zbpp.Pipeline:
    return small.make(linears() if model is None else model, mode, **more)


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


def no_optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> list[Any]:
    return []


OF_ONE_RANK: dict[str, Row] = {
    "no module": (lambda: make(with_last(lambda: torch.relu)), "layer 7 is"),
    "an optimizer's name": (
        lambda: make(optimizer=optimizer_of_one),
        "the optimizer's builder gave a str",
    ),
    "nothing is stepped": (
        lambda: make(optimizer=no_optimizer),
        "optimizer= steps none of the 16 parameters",
    ),
    "an argument": (lambda: make(n_microbatches=last_has(0, 4)), "n_microbatches is 0"),
    "another mode": (
        lambda: make(mode=last_has("ZBH1", "1F1B")),
        "different schedules, splits or settings",
    ),
    "another threshold": (
        lambda: make(clip_grad_norm=last_has(2.0, 1.0)),
        "ranks 0 and 1 were started with different",
    ),
    "another overlap": (
        lambda: make(overlap=last_has(False, True)),
        "different schedules, splits or settings",
    ),
    "processes": (
        lambda: make(n_stages=3),
        "2 processes cannot run 3 stages; start one process a stage",
    ),
    "replicas": (
        lambda: make(n_stages=1),
        r"or run replicas: mesh=zbpp.mesh\(stages=1, data_parallel=2\)",
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
    mesh: dict[str, int] | None = None,
    mode: str = "ZBH1",
) -> None:
    """Train on batches that differ along a dimension, from a step on.

    Args:
        differ: of ``"inputs"``, ``"targets"`` and ``"key"``, what does.
        since: the first step in which it does.
        dim: of the mesh.
        late: steps are validated in the next one.
        parts: a step is two calls.
        key: makes the key of a step; None: there is none.
        alone: each rank is given only what it reads.
        mesh: sizes; None: two stages.
        mode: of the schedule.
    """
    processes = zbpp.mesh(stages=2, **mesh) if mesh else None
    rank = dist.get_rank() if processes is None else processes.get_local_rank(dim)

    def draw(number: int, name: str) -> Tensor:
        number += 100 * (number >= since and rank == 1 and name in differ)
        seed = torch.Generator().manual_seed(2 * number + (name == "targets"))
        return torch.randn(16, WIDTH, generator=seed)

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

    is_late = True if late else None
    with make(mode=mode, mesh=processes, post_validation=is_late) as pipeline:
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
SAMPLER = "first and the last stage read other samples in step {}, .*Sampler"
OF_SAMPLES: dict[str, Row] = {
    "both": (lambda: read(BOTH, mode="1F1B"), SAMPLER.format(0)),
    "both, validated late": (lambda: read(BOTH, 2, late=True), SAMPLER.format(2)),
    "both, in parts": (lambda: read(BOTH, 1, parts=True), SAMPLER.format(1)),
    "keys": (lambda: read(ALL, 2, alone=True, key=torch.clone), SAMPLER.format(2)),
    "keys in lists": (
        lambda: read(("key",), 1, key=Tensor.tolist, parts=True),
        SAMPLER.format(1),
    ),
    "a key of letters": (
        lambda: read(key=lambda _: ["a", "b"]),
        "key is a list; give the numbers of the samples",
    ),
}


# ---- Meshes and wrapped layers.


def wrapped(how: str) -> zbpp.Pipeline:
    from torch.distributed.fsdp import fully_shard

    mesh = zbpp.mesh(stages=2, data_parallel=2)
    if how == "ddp":
        ddp = nn.parallel.DistributedDataParallel
        layers = [ddp(x, process_group=mesh.get_group("dp")) for x in linears()]
        return make(layers, mesh=mesh)
    return make([fully_shard(x, mesh=mesh["dp"]) for x in linears()], n_stages=4)


def on_mesh(n_stages: int | None = None, **options: Any) -> zbpp.Pipeline:
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    return make(mesh=zbpp.DataParallel(mesh=mesh, **options), n_stages=n_stages)


def other_names() -> zbpp.Pipeline:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "xp"))
    return make(mesh=mesh)


def differing(dim: str, change: Callable[[nn.Module], object]) -> zbpp.Pipeline:
    """Layers of which one is other on the last process along a dimension."""
    sizes = {"tp": "tensor", "dp": "data", "ep": "expert"}
    mesh = zbpp.mesh(stages=2, **{f"{sizes[dim]}_parallel": 2})
    layers = linears()
    if mesh.get_local_rank(dim):
        change(layers[1])
    return make(layers, mesh=mesh)


def on_another_mesh() -> zbpp.Pipeline:
    mesh = zbpp.mesh(stages=2, tensor_parallel=2)
    layers = linears()
    zbpp.deal(layers[1], mesh["tp"])
    return make(layers, mesh=mesh["pp"])


def widen(layer: Any) -> None:
    layer.more = nn.Parameter(torch.ones(1))


OF_MESHES: dict[str, Row] = {
    "layers of a replica": (
        lambda: differing("dp", widen),
        "ranks 0 and 1 were started with different layers of stage 0",
    ),
    "experts": (
        lambda: differing("ep", lambda layer: nn.init.ones_(layer.weight)),
        r"layers\.1\.weight: .* differ along 'ep', .*zbpp.deal",
    ),
    "parts of layers": (
        lambda: differing("tp", lambda layer: nn.init.ones_(layer.weight)),
        r"layers\.1\.weight: plain parameters that differ along 'tp', .*DTensors",
    ),
    "tensors on another mesh": (
        on_another_mesh,
        r"layers\.1\.weight is sharded along \('tp',\), and the pipeline's mesh has",
    ),
    "along tp": (
        lambda: read(BOTH, dim="tp", mesh={"tensor_parallel": 2}),
        "ranks 0 and 1 are neighbours along 'tp' and read other inputs",
    ),
    "size": (lambda: zbpp.mesh(stages=3), "there are 4; start as many"),
    "stages": (lambda: on_mesh(n_stages=4), "give it a dimension 'pp' of 4"),
    "shard": (lambda: on_mesh(shard="all"), "choose one of 'none', 'optimizer'"),
    "ddp": (lambda: wrapped("ddp"), "wrap them by `replicate`"),
    "fully_shard without a mesh": (lambda: wrapped("fsdp"), "mesh=mesh"),
    "names": (other_names, r"a pipeline knows \('pp', 'dp'"),
}

REFUSED = {2: OF_ONE_RANK | OF_SAMPLES, 4: OF_MESHES}
FINE: dict[int, dict[str, Callable[[], object]]] = {
    2: {
        "equal samples": lambda: read(),
        # augmented at random where they are read
        "other inputs": lambda: read(("inputs",)),
        "other targets": lambda: read(("targets",)),
        "others of the same samples": lambda: read(BOTH, key=torch.clone),
        "nothing to compare": lambda: read(BOTH, alone=True),
        "one process reads both": lambda: read(BOTH, mode="ZBV"),
    },
    4: {"replicas": lambda: read(BOTH, dim="dp", mesh={"data_parallel": 2})},
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


def outcomes(n: int) -> dict[str, tuple[str, str]]:
    refused = {name: outcome(function) for name, (function, _) in REFUSED[n].items()}
    return refused | {name: outcome(function) for name, function in FINE[n].items()}


@pytest.mark.dist
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_are_refused_alike(pool: Pool, n: int) -> None:
    first, *others = pool.run(outcomes, n, n)
    for name, (_, words) in REFUSED[n].items():
        assert all(found[name] == first[name] for found in others), name
        kind, text = first[name]
        assert kind == "RequestError" and "\n" not in text, (name, text)
        assert re.search(words, text), (name, text)
    for name in FINE[n]:
        assert all(found[name] == ("", "") for found in (first, *others)), name


def fail_on_last() -> tuple[str, str]:
    return outcome(lambda: make(with_last(lost)))


@pytest.mark.dist
def test_a_failure_of_one_rank_is_reported_on_the_others(pool: Pool) -> None:
    """It is no mistake of a request: the rank has its error, others a `PeerError`."""
    (kind, text), (last, words) = pool.run(fail_on_last, 2)
    assert (last, words) == ("FileNotFoundError", "weights-7.bin")
    assert kind == "PeerError" and "rank 1 failed" in text and words in text


# ---- Parameters that no step would train.


def warnings_of(pattern: str, frozen: bool, n_stages: int | None) -> list[str]:
    """Train what has a pattern in its name; all that is warned of."""

    def choose(named_parameters: list[tuple[str, nn.Parameter]]) -> list[Any]:
        chosen = [p for name, p in named_parameters if pattern in name]
        return [torch.optim.SGD(chosen, lr=0.1)] if chosen else []

    model = nn.Sequential(*linears()).requires_grad_(not frozen)
    x = torch.ones(8, WIDTH)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with make(model, "ZBH1", optimizer=choose, n_stages=n_stages) as pipeline:
            for _ in range(3):
                pipeline.step(x, x)
    texts = [str(one.message) for one in warned]
    return [text for text in texts if "gains little" not in text]


HALF = "8 parameter(s) learn, but no optimizer steps them (0.bias, 1.bias, 2."
FROZEN = "all parameters of the model are frozen"


def losses_with_other_limits() -> float:
    x = torch.ones(8, WIDTH)
    with make(timeout_s=last_has(50.0, 60.0)) as pipeline:
        return pipeline.step(x, x).loss


@pytest.mark.dist
def test_ranks_may_have_different_time_outs(pool: Pool) -> None:
    first, last = pool.run(losses_with_other_limits, 2)
    assert first == last


@pytest.mark.dist
@pytest.mark.parametrize(
    ("pattern", "frozen", "words"),
    [("", False, ""), ("weight", False, HALF), ("x", True, FROZEN)],
)
def test_one_rank_warns_once(
    pool: Pool, pattern: str, frozen: bool, words: str
) -> None:
    one = warnings_of(pattern, frozen, 2)
    first, last = pool.run(warnings_of, 2, pattern, frozen, None)
    assert (first, last) == (one, [])
    assert len(one) == bool(words) and all(words in text for text in one)


# ---- Models.


def first_numbers(shard: str) -> tuple[bool, list[Tensor]]:
    """If replicas were alike before; parameters and a buffer of a step of 0 since."""
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    torch.manual_seed(dist.get_rank())
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS)]
    for layer in layers:
        layer.register_buffer("scale", torch.rand(1))
    before = torch.stack([layer.weight.detach() for layer in layers])
    theirs = before.clone()
    dist.broadcast(theirs, group=mesh.get_group("dp"), group_src=0)
    processes = zbpp.DataParallel(mesh=mesh, shard=shard)
    with make(layers, mesh=processes) as pipeline:
        here = [layer for _, layer in pipeline.named_layers()]
        numbers = [x for layer in here for x in layer.state_dict().values()]
        numbers = [getattr(x, "full_tensor", lambda x=x: x)() for x in numbers]
        numbers = [x.detach().clone() for x in numbers]
    weights = [x for x in numbers if x.dim() == 2]
    assert all(any(map(partial(torch.equal, x), theirs)) for x in weights)
    return torch.equal(before, theirs), numbers


@pytest.mark.dist
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_replicas_begin_with_the_numbers_of_the_first(pool: Pool, shard: str) -> None:
    by_rank = pool.run(first_numbers, 4, shard)
    for (is_first, first), (was_alike, second) in (by_rank[:2], by_rank[2:]):
        assert is_first and not was_alike
        assert all(map(torch.equal, first, second))


def place_of_layer() -> float:
    mesh = zbpp.mesh(stages=1, tensor_parallel=2)
    layer = nn.Linear(WIDTH, WIDTH)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    layer.register_buffer("place", torch.tensor(float(mesh.get_local_rank("tp"))))
    with make([layer], mesh=mesh):
        return float(layer.place)


@pytest.mark.dist
def test_buffers_may_depend_on_the_place_within_a_replica(pool: Pool) -> None:
    assert pool.run(place_of_layer, 2) == [0.0, 1.0]


def drawn(seed: int) -> tuple[list[Tensor], Tensor]:
    """What a builder draws in a process of two, and what is drawn afterwards."""
    torch.manual_seed(seed)
    model = zbpp.layers_from(
        lambda indices: [nn.Linear(WIDTH, WIDTH) for _ in indices], n_layers=N_LAYERS
    )
    with make(model, "ZBV") as pipeline:
        return [p.detach() for _, p in pipeline.named_parameters()], torch.rand(1)


@pytest.mark.dist
def test_chunks_of_one_seed_draw_different_weights(pool: Pool) -> None:
    (one, next_one), (other, next_other) = pool.run(drawn, 2, 3)
    weights = [x for x in (*one, *other) if x.dim() == 2]
    assert len({float(x[0, 0]) for x in weights}) == N_LAYERS
    assert torch.equal(next_one, next_other)


@pytest.mark.parametrize("mode", ["VPP", "ZBV"])
def test_one_process_draws_what_the_plain_model_draws(mode: str) -> None:
    def build(indices: range) -> list[nn.Module]:
        return [nn.Linear(WIDTH, WIDTH) for _ in indices]

    torch.manual_seed(0)
    layers = zbpp.layers_from(build, n_layers=N_LAYERS)
    state = make(layers, mode, n_stages=2).state_dict()["model"]
    torch.manual_seed(0)
    plain = nn.Sequential(*build(range(N_LAYERS))).state_dict()
    assert len(state) == len(plain)
    assert all(torch.equal(state[f"layers.{name}"], x) for name, x in plain.items())


def test_a_mesh_of_one_process_needs_no_launcher() -> None:
    assert not dist.is_initialized()
    try:
        assert zbpp.mesh(stages=1).size() == 1
    finally:
        dist.destroy_process_group()
