"""Costs of a schedule that recomputes: the one place where they are made of others.

Costs that are given, measured or estimated per chunk are those without recompute. What
a `Schedule` recomputes makes B longer, and changes what the passes hold.
"""

from dataclasses import replace

from zbpp.core.costs import Costs, LayerCosts
from zbpp.core.costs.layers import chunk_layers
from zbpp.core.errors import RequestError
from zbpp.core.schedule import Schedule

__all__ = ["recomputed"]


def recomputed(costs: Costs, schedule: Schedule) -> Costs:
    """Costs of a schedule's passes, with what it recomputes.

    Of a chunk whose layers are recomputed in part, all layers count as equal. Without
    ``m_r``, and with no limit to keep, a part that is recomputed leaves nothing.

    Args:
        costs: of the chunks without recompute.
        schedule: says what is recomputed; without that the costs stay as they are.

    Raises:
        RequestError: the costs do not fit the placement; m_r is missing where there is
            a limit; or a chunk is recomputed in part and its layers are not known.
    """
    if schedule.recompute is None or not any(schedule.recompute):
        return costs
    split = schedule.split or (1,) * schedule.placement.n_chunks
    if schedule.split is None and any(
        not isinstance(which, bool) for which in schedule.recompute
    ):
        raise RequestError(
            f"{schedule.name} recomputes some layers of a chunk, and does not say how "
            "many it has; plan it with --layers, so that it has a split"
        )
    # What an F computes again in a B finds its parameters gathered.
    gathers, bare = costs.gathers, replace(costs, gathers=False)
    layers = with_m_r(chunk_layers(bare, schedule.placement, split))
    again, first = [], 0
    for chunk, n_layers in enumerate(split):
        again += [first + one for one in schedule.recomputes(chunk, n_layers)]
        first += n_layers
    costs = layers.on(schedule.placement, split, recompute=again)
    return replace(costs, gathers=gathers)


def with_m_r(layers: LayerCosts) -> LayerCosts:
    """Take m_r for 0 where it is not given and no limit asks for it.

    Raises:
        RequestError: a limit does.
    """
    if layers.m_r is not None:
        return layers
    if layers.limit is not None:
        raise RequestError(
            "there is a memory limit, but no m_r: what F leaves of a part that is "
            "recomputed (its input, as a rule); add it to the costs"
        )
    return replace(layers, m_r=0.0)
