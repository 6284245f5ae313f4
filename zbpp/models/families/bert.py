"""BERT and models built like it: embeddings in one module, an encoder, a pooler."""

from zbpp.models.family import Family

__all__ = ["BERT"]

BERT = Family(
    "encoder.layer",
    before=("embeddings", "embeddings_project"),
    after=("pooler",),
)
