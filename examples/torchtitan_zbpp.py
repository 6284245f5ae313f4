"""Plans and the split backward of zbpp in torchtitan; see `torchtitan.md`.

spec.pipelining_fn = with_split_backward(spec.pipelining_fn)
config.parallelism.module_fqns_per_model_part = module_names("plan.json")
"""

from collections.abc import Callable
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import zbpp
from zbpp.runtime.backward.torch_stage import SplitModule

FIRST, LAST = ["tok_embeddings"], ["norm", "lm_head"]


def with_split_backward(pipelining: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's ``pipelining_fn``: its stages then run our B and our W.

    The model parts that it returns stay the bare modules, so that optimizers and
    checkpoints see the parameters under torchtitan's names.
    """

    def split(model: Any, **settings: Any) -> Any:
        schedule, *rest = pipelining(model, **settings)
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.submod = SplitModule(stage.submod)
            stage.dw_builder = stage.submod.dw_builder
        return schedule, *rest

    return split


def module_names(plan: str | Path) -> list[list[str]]:
    """Names of the modules of each chunk of a plan, in the order of the chunks.

    Args:
        plan: a schedule or plan file with a split; its first layer is the embedding,
            its last one the norm and the head, those between are the blocks.

    Raises:
        RequestError: the plan has no split.
    """
    schedule = zbpp.plan(str(plan))
    if schedule.split is None:
        raise zbpp.RequestError(
            f"{plan} has no split; plan it with the costs of the layers (--layers)"
        )
    ends = list(accumulate(schedule.split, initial=0))
    blocks = [[f"layers.{i}"] for i in range(ends[-1] - 2)]
    names = [FIRST, *blocks, LAST]
    return [list(chain(*names[first:end])) for first, end in pairwise(ends)]
