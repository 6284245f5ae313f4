"""State of learning-rate schedulers, for parameter groups that may be others now.

A scheduler has its optimizer's groups, and every stage has an optimizer of its own.
What a scheduler keeps per group goes by the names of the parameters in it; all else
must be the same on all stages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from zbpp.checkpoint.owned import Owned
from zbpp.checkpoint.values import misfit

__all__ = ["fit_schedulers", "scheduler_state"]

_PER_GROUP = {
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
}
_INNER = "_schedulers"  # of those that are made of others

Groups = list[list[str]]


def scheduler_state(owned: Owned) -> list[dict[str, Any]]:
    """State of every scheduler, with its place among those of its optimizer."""
    return [
        {"groups": groups, "place": place, "state": scheduler.state_dict()}
        for scheduler, groups, place in _each(owned)
    ]


def fit_schedulers(
    owned: Owned, saved: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[Any, dict[str, Any]]], list[str]]:
    """Find the state of every scheduler.

    Returns:
        Schedulers and what they are to load, and words about what does not fit.
    """
    fitted, wrong = [], []
    for number, (scheduler, groups, place) in enumerate(_each(owned)):
        names = {name for group in groups for name in group}
        found = [
            one
            for one in saved
            if one["place"] == place
            and names & {name for group in one["groups"] for name in group}
        ]
        if not found:
            wrong.append(f"the state of scheduler {number} is missing")
            continue
        parts = [(one["groups"], one["state"]) for one in found]
        now = scheduler.state_dict()
        words = _misfit([state for _, state in parts], now, number)
        if words is not None:
            wrong.append(words)
            continue
        state = _joined(parts, groups, now)
        if state is None:
            wrong.append(
                f"the states of scheduler {number} differ among the stages that saved"
            )
        else:
            fitted.append((scheduler, state))
    if saved and not owned.schedulers and owned.optimizers:
        wrong.append(
            "there is a state of schedulers, but none are attached: call "
            "pipeline.attach(*schedulers) first"
        )
    return fitted, wrong


def _misfit(
    states: list[dict[str, Any]], now: dict[str, Any], number: int
) -> str | None:
    """Words about saved parts of another kind; versions of torch keep other parts."""
    for state in states:
        shared = {name: value for name, value in now.items() if name in state}
        words = misfit(state, shared, f"the state of scheduler {number}")
        if words is None and len(state.get(_INNER) or ()) != len(now.get(_INNER, ())):
            words = f"the state of scheduler {number} has other schedulers in it"
        if words is not None:
            return words
    return None


def _each(owned: Owned) -> list[tuple[Any, Groups, int]]:
    found, counts = [], dict[int, int]()
    for scheduler in owned.schedulers:
        optimizer = scheduler.optimizer
        place = counts.get(id(optimizer), 0)
        counts[id(optimizer)] = place + 1
        groups = [
            [owned.name_of(p).name for p in group["params"]]
            for group in optimizer.param_groups
        ]
        found.append((scheduler, groups, place))
    return found


def _joined(
    parts: list[tuple[Groups, dict[str, Any]]], groups: Groups, now: dict[str, Any]
) -> dict[str, Any] | None:
    """One state out of those that were saved; None if they contradict each other."""
    joined: dict[str, Any] = {}
    for name in parts[0][1]:
        values: list[Any] = [state.get(name) for _, state in parts]
        per_group = name in _PER_GROUP and all(
            isinstance(value, list) and len(value) == len(saved)
            for value, (saved, _) in zip(values, parts, strict=True)
        )
        if per_group:
            joined[name] = []
            for number, group in enumerate(groups):
                its = [
                    value[place]
                    for value, (saved, _) in zip(values, parts, strict=True)
                    for place, names in enumerate(saved)
                    if set(names) & set(group)
                ]
                if not group:
                    its = [now[name][number]]
                if not its or not _alike(its):
                    return None
                joined[name].append(its[0])
        elif name == _INNER:
            inner = [
                _joined(
                    [
                        (saved, one[i])
                        for one, (saved, _) in zip(values, parts, strict=True)
                    ],
                    groups,
                    now[name][i],
                )
                for i in range(len(values[0]))
            ]
            if None in inner:
                return None
            joined[name] = inner
        elif _alike(values):
            joined[name] = values[0]
        else:
            return None
    return joined


def _alike(values: list[Any]) -> bool:
    return all(repr(value) == repr(values[0]) for value in values)
