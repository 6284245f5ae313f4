"""ViT: patches in place of tokens; the image itself stays with the first layer."""

from zbpp.models.family import Family

__all__ = ["VIT"]

VIT = Family(
    "layers",
    before=("embeddings",),
    after=("layernorm", "pooler"),
    only_front=("pixel_values", "bool_masked_pos"),
)
