"""The state that a run leaves, compared to the last bit."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbpp.pipeline import Pipeline

State = dict[str, Any]


def look(pipeline: Pipeline, schedulers: list[Any]) -> State:
    """All that a checkpoint would hold, copied."""
    state: State = {}
    for name, layer in pipeline.named_layers():
        for key, value in layer.state_dict().items():
            state[f"{name}.{key}"] = value.clone()
    for index, optimizer in enumerate(pipeline.optimizers):
        stage = pipeline.rank + index
        held = optimizer.state_dict()
        for key, values in held["state"].items():
            for name, value in values.items():
                kept = value.clone() if isinstance(value, Tensor) else value
                state[f"stage {stage}, {key}, {name}"] = kept
        for number, group in enumerate(held["param_groups"]):
            for name, value in group.items():
                kept = value.clone() if isinstance(value, Tensor) else value
                state[f"stage {stage}, group {number}, {name}"] = kept
        if schedulers:
            state[f"stage {stage}, schedule"] = schedulers[index].get_last_lr()
    scaler = pipeline.loss_scaler
    state["loss scale"] = None if scaler is None else scaler.state_dict()
    return state


@dataclass
class Outcome:
    """The results by step, and the states at the looks and at the end."""

    results: list[tuple[float, float, bool]]
    states: list[State]
    rollbacks: list[int]
    random: Tensor
    pythons_random: Any


def difference(left: Outcome, right: Outcome) -> str | None:
    """The first thing that is not the same to the last bit."""
    for step, (ours, theirs) in enumerate(
        zip(left.results, right.results, strict=True)
    ):
        if repr(ours) != repr(theirs):
            return f"step {step}: {ours} is not {theirs}"
    if left.pythons_random != right.pythons_random:
        return "the states of Python's generator differ"
    if not torch.equal(left.random, right.random):
        return "the random states differ"
    for index, (ours, theirs) in enumerate(zip(left.states, right.states, strict=True)):
        if ours.keys() != theirs.keys():
            return f"look {index}: {sorted(ours.keys() ^ theirs.keys())[:3]}"
        for key, value in ours.items():
            if not same(value, theirs[key]):
                return f"look {index}: {key}: {value} is not {theirs[key]}"
    return None


def same(left: Any, right: Any) -> bool:
    """NaN equals NaN here, but -0.0 is not 0.0."""
    if isinstance(left, Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bytes_of(left) == bytes_of(right)
    return repr(left) == repr(right)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
