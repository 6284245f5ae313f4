"""GPT-2: learned positions, and a head that is the embedding."""

from zbpp.models.family import Family

__all__ = ["GPT2"]

GPT2 = Family("h", before=("wte", "wpe", "drop"), after=("ln_f",))
