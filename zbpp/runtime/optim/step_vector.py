"""The numbers that a stage adds to the sums of a step; `decision` reads them.

squared norm of each layer | losses, weights, metrics of micro-batches | tied | notes
"""

from collections.abc import Collection

import torch
from torch import Tensor

from zbpp.runtime.comm.peers import ALONE, Peers
from zbpp.runtime.optim.norms import NonFiniteFinder, squared_norms
from zbpp.runtime.stage import Stage

__all__ = ["step_vector"]


def step_vector(
    stage: Stage,
    parameters: Collection[Tensor],
    peers: Peers = ALONE,
    *,
    n_layers: int,
    finder: NonFiniteFinder | None,
) -> Tensor:
    """Make one stage's vector, float64; each entry of another stage is zero.

    Args:
        stage: whose backwards are done.
        parameters: whose gradients count, unless another stage counts them.
        peers: processes of the stage; each counts the parts that only it holds.
        n_layers: of the whole model.
        finder: it looked for gradients that are not finite; None: nobody did.
    """
    losses = stage.loss.table().flatten()
    tied = n_layers + len(losses)
    notes = tied + len(stage.ties.plan.slots)
    end = notes + (n_layers if finder is not None else 0)
    vector = torch.zeros(end, dtype=torch.float64, device=stage.device)
    counted = [p for p in parameters if p not in stage.ties.copies]
    for layer, squared in squared_norms(stage, counted, peers):
        vector[layer] = squared
    if peers.counts_losses:
        vector[n_layers:tied] = losses
    for slot, fingerprint in stage.ties.fingerprints().items():
        vector[tied + slot] = fingerprint
    for layer, note in finder.found.items() if finder is not None else ():
        vector[notes + layer] = note
    return vector
