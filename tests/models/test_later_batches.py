"""Batches that differ from the first one in structure, shape or branch."""

import copy

import pytest
import torch
from torch import Tensor, nn

import zbpp
from zbpp import RequestError
from zbpp.models import cut

D = 8
IDS = torch.arange(8).reshape(2, 4)
KEEP = torch.ones(2, 4, dtype=torch.bool)
PADDED = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        mixed = hidden if mask is None else hidden * (1 - mask.to(hidden.dtype))
        return hidden + self.linear(mixed.cumsum(1))


class HidesPadding(nn.Module):
    """1 where a token is left out; it has weights, so only the first layer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, keep: Tensor) -> Tensor | None:
        return (~keep)[..., None].long()


class HidesIfNeeded(HidesPadding):
    def forward(self, keep: Tensor) -> Tensor | None:
        return None if bool(keep.all()) else super().forward(keep)


class Selects(HidesPadding):
    """Puts out floats that the model uses at padded places alone."""

    def forward(self, keep: Tensor) -> Tensor | None:
        return self.scale.detach().expand(*keep.shape, 1)


class Model(nn.Module):
    def __init__(self, hides: nn.Module, *, reads_in_head: bool = False) -> None:
        super().__init__()
        self.embed, self.hides = nn.Embedding(8, D), hides
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(D)
        self.reads_in_head = reads_in_head

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        hidden = self.embed(ids)
        mask = None if keep is None else self.hides(keep)
        if isinstance(self.hides, Selects) and keep is not None:
            mask = torch.where(keep[..., None], 0.0, mask)
        for block in self.blocks:
            hidden = block(hidden, None if self.reads_in_head else mask)
        hidden = self.norm(hidden)
        return hidden * (1 - mask) if self.reads_in_head else hidden


def later(model: nn.Module, *batches: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs of the last of several batches, of a pipeline and of the plain model."""
    plain = copy.deepcopy(model)
    layered = cut(model, "blocks", before=("embed", "hides"), after=("norm",))
    with zbpp.Pipeline(
        layered, "ZBV", n_stages=2, n_microbatches=1, optimizer=None,
        loss_fn=nn.functional.mse_loss,
    ) as pipeline:  # fmt: skip
        for batch in batches:
            outputs = pipeline.predict(batch)
    return outputs, plain.eval()(**batches[-1]).detach()


@pytest.mark.parametrize("hides", [HidesPadding, Selects])
@pytest.mark.parametrize(
    "first",
    [
        {"ids": IDS},
        {"ids": IDS, "keep": KEEP},
        {"ids": IDS[:, :3], "keep": KEEP[:, :3]},
    ],
    ids=["no mask", "nothing left out", "shorter"],
)
def test_a_batch_with_another_mask_is_computed_as_the_plain_model_does(hides, first):
    ours, plain = later(Model(hides()), first, {"ids": IDS, "keep": PADDED})
    assert torch.equal(ours, plain)


def test_a_branch_on_the_values_of_a_mask_is_refused_when_it_is_taken():
    same, padded = {"ids": IDS, "keep": KEEP}, {"ids": IDS, "keep": PADDED}
    assert torch.equal(*later(Model(HidesIfNeeded()), same, same))
    words = "block 0 is called with .* in the first layer"
    with pytest.raises(RequestError, match=words):
        later(Model(HidesIfNeeded()), same, padded)


def test_numbers_that_a_head_reads_from_before_the_blocks_are_refused_at_once():
    """Those of a stand-in are 0 where nothing is left out: the batch hides it."""
    model = Model(HidesPadding(), reads_in_head=True)
    with pytest.raises(RequestError, match="reads what ran before"):
        later(model, {"ids": IDS, "keep": KEEP})
