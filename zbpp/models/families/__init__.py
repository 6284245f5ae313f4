"""Families that need more than their configuration says, one short file each."""

from zbpp.models.families.bert import BERT
from zbpp.models.families.encoder_decoder import BART, T5
from zbpp.models.families.gpt2 import GPT2
from zbpp.models.families.vit import VIT

__all__ = ["BART", "BERT", "GPT2", "T5", "VIT"]
