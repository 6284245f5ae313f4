"""Words for what the replicas of a stage hold in parts.

========== =============================== ===========================
shard      each replica keeps              gradients are summed
========== =============================== ===========================
none       everything                      once, after the last W
optimizer  its part of the state           once, after the last W
gradients  its part of gradients too       after every W
parameters its part of parameters as well  after every W
========== =============================== ===========================

Also known as data parallelism and ZeRO 1, 2 and 3 (Rajbhandari et al., arXiv
1910.02054). With ``optimizer`` and ``gradients`` parameters are in parts between steps,
and whole from a chunk's first F to its last B.
"""

from typing import Literal, get_args

Shard = Literal["none", "optimizer", "gradients", "parameters"]
"""State that is divided among replicas; each word includes the ones before."""

SHARDS: tuple[Shard, ...] = get_args(Shard)


def reduces_every(shard: str) -> bool:
    """True if gradients are summed after every W, not after the last."""
    return shard in ("gradients", "parameters")
