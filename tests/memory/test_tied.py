"""Tied weights in the estimate: copies, gradients sent and received."""

from functools import cache

import torch
from torch import Tensor, nn

from zbpp.memory import StageEstimate
from zbpp.memory.estimate import Steps, estimate_modes, stage_costs
from zbpp.memory.layers import model_memory
from zbpp.memory.model import ModelMemory
from zbpp.planning import plan

VOCABULARY, WIDTH = 4096, 64
SIZE = VOCABULARY * WIDTH * 4


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


STEPS = Steps(sgd, post_validation=False)


@cache
def memory_of(*, tied: bool) -> ModelMemory:
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    if tied:
        head.weight = embedding.weight
    batch = torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    return model_memory([embedding, *blocks, head], batch, loss_fn)


def stages_of(mode: str, n_stages: int, *, tied: bool) -> list[StageEstimate]:
    memory, sizes = memory_of(tied=tied), {"n_stages": n_stages, "n_microbatches": 4}
    return list(estimate_modes(memory, STEPS, [mode], **sizes).modes[mode])


def test_ends_on_two_stages_hold_a_copy_and_what_they_exchange() -> None:
    tied = stages_of("1F1B", 4, tied=True)
    untied = stages_of("1F1B", 4, tied=False)
    for stage in (0, 3):
        assert tied[stage].parameters == untied[stage].parameters
        assert tied[stage].buffers - untied[stage].buffers == SIZE  # sent
        assert tied[stage].peak - untied[stage].peak >= SIZE
    for stage in (1, 2):
        assert tied[stage] == untied[stage]


def test_planners_count_what_ends_receive_in_o() -> None:
    schedule = plan("1F1B", n_stages=4, n_microbatches=4)
    tied, untied = (
        stage_costs(memory_of(tied=tied), STEPS, schedule) for tied in (True, False)
    )
    assert untied.peak_o == (0, 0, 0, 0) and tied.peak_o == (SIZE, 0, 0, SIZE)


def test_ends_on_one_stage_hold_one_tensor_and_exchange_nothing() -> None:
    (tied, other), (untied, _) = (
        stages_of("ZBV", 2, tied=True),
        stages_of("ZBV", 2, tied=False),
    )
    assert untied.parameters - tied.parameters == SIZE
    assert untied.buffers == tied.buffers
    assert other == stages_of("ZBV", 2, tied=False)[1]
