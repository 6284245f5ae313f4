"""Parameters that chunks of one process share, and nobody has named, are refused."""

import torch
from small_model import batch, make_pipeline, refusal
from torch import nn

N_LAYERS = 4


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


def slices_one_model(layers: range) -> list[nn.Module]:
    return MODEL.layers()[layers.start : layers.stop]


MODEL = Language()


def test_a_shared_parameter_that_nobody_has_named_is_refused() -> None:
    assert "layers 0 and 3 share a parameter" in refusal(
        make_pipeline, "1F1B", 2, model=slices_one_model, n_layers=N_LAYERS
    )


def test_tied_layers_in_one_chunk_are_welcome() -> None:
    pipeline = make_pipeline("1F1B", 1, model=slices_one_model, n_layers=N_LAYERS)
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
