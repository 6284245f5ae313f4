"""Parameters shared by chunks are noticed, whoever builds the layers and where."""

import pytest
import torch
from pool import Pool
from small_model import batch, build, make_pipeline, refusal
from torch import Tensor, nn

from zbpp.runtime.partition import build_chunks, partition_layers

N_LAYERS = 4


class Head(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.T


class Language(nn.Module):
    """GPT-2's shape: ``lm_head.weight is wte.weight``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(11, 16)
        self.h = nn.ModuleList(nn.Linear(16, 16) for _ in range(N_LAYERS - 2))
        self.lm_head = nn.Linear(16, 11, bias=False)
        self.lm_head.weight = self.wte.weight

    def layers(self) -> list[nn.Module]:
        return [self.wte, *self.h, self.lm_head]


def slices_one_model():
    model = Language()
    return lambda layers: model.layers()[layers.start : layers.stop]


def makes_a_model_each_time():
    return lambda layers: Language().layers()[layers.start : layers.stop]


def shares_a_module():
    """The head holds the embedding itself."""

    def layers(indices: range) -> list[nn.Module]:
        model = Language()
        model.lm_head = Head(model.wte)
        return model.layers()[indices.start : indices.stop]

    return layers


TIED = (slices_one_model, makes_a_model_each_time, shares_a_module)


def ask(kind: int, n_stages: int | None) -> str:
    return refusal(
        make_pipeline, "1F1B", n_stages, model=TIED[kind](), n_layers=N_LAYERS
    )


@pytest.mark.parametrize("kind", range(len(TIED)))
def test_in_one_process(kind: int) -> None:
    assert "layers 0 and 3 share a parameter" in ask(kind, 2)


def ask_in_processes(kind: int) -> str:
    try:
        return ask(kind, None)
    except RuntimeError as error:
        return str(error)


@pytest.mark.dist
@pytest.mark.parametrize("kind", range(len(TIED)))
def test_between_processes(pool: Pool, kind: int) -> None:
    messages = pool.run(ask_in_processes, 2, kind)
    assert "layers 0 and 3 share a parameter" in messages[0]
    for message in messages:
        assert "layers 0 and 3 share a parameter" in message


def test_tied_layers_in_one_chunk_are_welcome() -> None:
    for make in TIED:
        pipeline = make_pipeline("1F1B", 1, model=make(), n_layers=N_LAYERS)
        pipeline.step(*batch(0))


def test_a_model_that_is_untied_again_is_welcome() -> None:
    def layers(indices: range) -> list[nn.Module]:
        model = Language()
        head = nn.Linear(16, 11, bias=False)
        head.weight = nn.Parameter(model.wte.weight.detach().clone())
        untied = [*model.layers()[:-1], head]  # the model's own head is tied still
        return untied[indices.start : indices.stop]

    pipeline = make_pipeline("1F1B", 2, model=layers, n_layers=N_LAYERS)
    pipeline.step(*batch(0))


def test_only_a_builder_under_suspicion_is_called_for_all_layers() -> None:
    asked: list[range] = []

    def plain(layers: range) -> list[nn.Module]:
        asked.append(layers)
        return build(layers)

    def whole(layers: range) -> list[nn.Module]:
        asked.append(layers)
        model = Language()
        return model.layers()[layers.start : layers.stop]

    build_chunks(plain, partition_layers(9, 2), [1])
    assert asked == [range(5, 9)]
    asked.clear()
    ranges = partition_layers(N_LAYERS, 2)
    assert "layers 0 and 3" in refusal(build_chunks, whole, ranges, [0])
    assert asked == [range(2), range(N_LAYERS)]


def test_the_second_call_draws_no_random_numbers() -> None:
    def layers(indices: range) -> list[nn.Module]:
        made = [nn.Embedding(11, 16), nn.Linear(16, 11)]
        holder = nn.ModuleList([nn.Linear(16, 11)])
        holder[0].weight = made[1].weight  # suspicious, but not of another chunk
        return made[indices.start : indices.stop]

    ranges = partition_layers(2, 2)
    torch.manual_seed(3)
    layers(range(1))
    expected = torch.rand(3)
    torch.manual_seed(3)
    build_chunks(layers, ranges, [0])
    assert torch.equal(torch.rand(3), expected)
