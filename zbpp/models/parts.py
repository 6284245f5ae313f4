"""Layers of a cut model: what runs before its blocks, the blocks, the rest.

FrontLayer   batch -> {"hidden": .., "batch": ..}
BlockLayer   the same with another hidden state
BackLayer    -> what the model puts out
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.models.calls import (
    Call,
    Plan,
    Recorder,
    arrangement,
    leaves,
    outline,
    with_handed,
    with_leaves,
)
from zbpp.models.frame import Frame
from zbpp.models.made_up import FollowsMadeUp
from zbpp.models.recorded import Collected, Collector
from zbpp.models.stand_ins import MOST_SHAPES, full, look, slim
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.torch_internals import is_fake

__all__ = ["OWN", "BackLayer", "BlockLayer", "FrontLayer", "Owned", "Value"]

Value = dict[str, Any]
"""The parts that travel: "hidden", "batch", and, where they are needed, "shared"
(arguments of blocks), "more" (of the block before, for the next one), "router"."""

OWN = "own"
"""Attribute of a layer below which modules have the model's own names."""


class Owned(nn.Module):
    """Modules and parameters of a model under its own names."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            *above, last = name.split(".")
            self.at(".".join(above)).add_module(last, module)

    def at(self, path: str) -> nn.Module:
        """The container at a path, made if there is none."""
        held: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in held._modules:
                held.add_module(part, nn.Module())
            held = held._modules[part]  # type: ignore[assignment]
        return held


class _Framed(nn.Module):
    """A layer that runs the model's forward around what it owns."""

    compiles = None
    """Nothing of it is compiled: its forward is more Python than kernels."""

    def __init__(self, owned: Owned, frame: Frame, plan: Plan) -> None:
        super().__init__()
        self.add_module(OWN, owned)
        self.frame, self.plan = frame, plan

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frame.apply(fn)
        self.plan.move(fn)
        return result

    def _signature(self, batch: Any) -> str | None:
        """The things beside values that the forward may depend on; None: not known.

        What has been found out for one batch holds for all of the same signature.
        """
        computes = torch.is_autocast_enabled(self.frame.site.device.type)
        return look(batch, self.training, computes)


class FrontLayer(_Framed):
    """The work of the model before its first block.

    Args:
        owned: modules that run before the blocks.
        frame: with them.
        plan: how blocks are called.
        n_blocks: their number.
        only_front: entries of the batch that only this layer reads: their shapes
            travel.
    """

    def __init__(
        self,
        owned: Owned,
        frame: Frame,
        plan: Plan,
        *,
        n_blocks: int,
        only_front: tuple[str, ...],
    ) -> None:
        super().__init__(owned, frame, plan)
        self._n_blocks, self._only_front = n_blocks, only_front
        self._decided: dict[str | None, bool] = {}
        """By signature, True if tensors that blocks are called with travel: so they do
        where they do not follow from the batch."""

    def forward(self, batch: Any) -> Value:
        """From a micro-batch to the first hidden state."""
        sent = slim(batch, self._only_front)
        structure = self.plan.structure(full(sent, self._only_front))
        signature = self._signature(batch)
        carries = self._decided.get(signature)
        n_calls = 1 if carries is False else self._n_blocks
        recorder = Recorder(n_calls, structure)
        self.frame.run(batch, recorder, training=self.training)
        if recorder.hidden is None or len(recorder.calls) < n_calls:
            raise RequestError(
                f"the forward called {len(recorder.calls)} of {self._n_blocks} blocks"
            )
        value: Value = {"hidden": recorder.hidden, "batch": sent}
        if carries is not False and not is_fake(recorder.hidden):
            carries = self._compare(recorder, batch, sent, carries)
            if signature is not None:
                self._remember(signature, carries)
        if carries:
            value["shared"] = tuple(leaves(recorder.calls, batch))
        return value

    def _compare(
        self, recorder: Recorder, batch: Any, sent: Any, carries: bool | None
    ) -> bool:
        """Compare the calls of blocks with those that the other layers will find.

        Args:
            recorder: has the calls.
            batch: of the forward.
            sent: what of it travels.
            carries: what is known; None: it is to be found out.

        Returns:
            True if tensors that blocks are called with must travel.

        Raises:
            RequestError: more than the values of tensors differs.
        """
        ours, batch_there = recorder.calls, full(sent, self._only_front)
        assert recorder.hidden is not None
        device = recorder.hidden.device
        if carries is None:
            follows = self.plan.follows_made_up(batch_there, device)
        theirs = self.plan.calls(batch_there, device).calls
        if carries is None:
            carries = follows or not _same(ours, theirs)
        _check_alike(outline(ours), outline(theirs))
        if carries:
            _check_alike(arrangement(ours, batch), arrangement(theirs, batch_there))
        return carries

    def _remember(self, signature: str, carries: bool) -> None:
        if len(self._decided) == MOST_SHAPES:
            self._decided.clear()
        self._decided[signature] = carries


class BlockLayer(nn.Module):
    """One block of the model.

    Args:
        block: the model's own module.
        index: of it.
        name: of it, in errors.
        plan: how blocks are called.
        only_front: as for `FrontLayer`.
        collector: of outputs that join the loss; None: there are none.
    """

    own_place = frozenset({"_index", "_name"})
    """Attributes in which blocks that are alike differ; see `zbpp.memory`."""

    compiles = "block"
    """The compiled part of the layer: a module in it."""

    def __init__(
        self,
        block: nn.Module,
        index: int,
        name: str,
        plan: Plan,
        *,
        only_front: tuple[str, ...],
        collector: Collector | None,
    ) -> None:
        super().__init__()
        self.block = block
        self._index, self._name, self._only_front = index, name, only_front
        notes = None if collector is None else collector.listen(block)
        self.plan, self.notes = plan, notes

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.plan.move(fn)
        return result

    def forward(self, value: Value) -> Value:
        """Run the block on the hidden state, with its own arguments."""
        hidden = value["hidden"]
        batch = full(value["batch"], self._only_front)
        planned = self.plan.calls(batch, hidden.device)
        calls = planned.calls
        if "shared" in value:
            calls = with_leaves(calls, batch, value["shared"])
        args, kwargs = with_handed(calls[self._index], value.get("more", ()))
        changed = dict(value)
        if self.notes is not None:
            self.notes.take()  # of a forward that was broken off, as a recomputed one
        output = self.block(hidden, *args, **kwargs)
        if self.notes is not None:
            changed["router"] = (*value.get("router", ()), self.notes.take())
        structure = self.plan.structure(batch)
        changed["hidden"], more = structure.unwrap(output, self._name, planned.read)
        if planned.read:
            changed["more"] = more if self._index + 1 < len(calls) else ()
        return changed


class BackLayer(_Framed):
    """The work of the model after its last block, with its loss if it has labels.

    Args:
        owned: modules that run after the blocks.
        frame: with them.
        plan: how blocks are called.
        n_blocks: their number.
        only_front: as for `FrontLayer`.
        collector: of outputs of blocks that join the loss.
    """

    def __init__(
        self,
        owned: Owned,
        frame: Frame,
        plan: Plan,
        *,
        n_blocks: int,
        only_front: tuple[str, ...],
        collector: Collector | None,
    ) -> None:
        super().__init__(owned, frame, plan)
        self._n_blocks, self._only_front = n_blocks, only_front
        self.collector = collector
        self._checked: set[str | None] = set()
        """Signatures of forwards that read no stand-ins."""

    def forward(self, value: Value) -> Any:
        """From the last hidden state to the model's output."""
        hidden: Tensor = value["hidden"]
        batch = full(value["batch"], self._only_front)
        structure = self.plan.structure(batch)
        router: Collected = value.get("router", ())

        called: list[int] = []

        def inject(index: int, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            called.append(index)
            if len(called) > self._n_blocks:
                raise RequestError(
                    f"block {index} is called a second time; a pipeline needs blocks "
                    "that run once each, in order"
                )
            if self.collector is not None:
                self.collector.replay(self.frame.slots()[index], router[index])
            is_last = index == self._n_blocks - 1
            return structure.wrap(hidden if is_last else args[0], index)

        self.frame.on(hidden.device)
        signature = self._signature(batch)
        if signature in self._checked or is_fake(hidden):
            output = self.frame.run(batch, inject, training=self.training)
            return _plain(output, self.frame.site.is_made_up)
        with FollowsMadeUp(self.frame.site) as followed:
            output = self.frame.run(batch, inject, training=self.training)
        output = _plain(output, self.frame.site.is_made_up)
        _check_numbers(hidden, output, follows_made_up=followed.follows(output))
        if signature is not None:
            if len(self._checked) == MOST_SHAPES:
                self._checked.clear()
            self._checked.add(signature)
        return output


def _check_alike(ours: list[str], theirs: list[str]) -> None:
    """Compare texts of the calls of blocks in the first layer and elsewhere.

    Raises:
        RequestError: they differ.
    """
    for index, (here, there) in enumerate(zip(ours, theirs, strict=True)):
        if here != there:
            raise RequestError(
                f"block {index} is called with {here} in the first layer, and the "
                f"layers after it expect {there}; what a block is called with, but for "
                "the values of tensors, must follow from the batch alone: not from "
                "values that modules before the blocks compute, nor from train or "
                "eval mode"
            )


def _check_numbers(hidden: Tensor, output: Any, *, follows_made_up: bool) -> None:
    """Refuse a head that reads a stand-in: what these put out are no numbers.

    Raises:
        RequestError: so it is.
    """
    floats = [t for t in tensors_in(output) if t.dim() and t.is_floating_point()]
    if follows_made_up or (
        any(bool(t.isnan().any()) for t in floats) and bool(hidden.isfinite().all())
    ):
        raise RequestError(
            "what runs after the blocks reads what ran before them, beside the hidden "
            "state; hand it on inside the hidden state, or cut the model yourself"
        )


def _plain(output: Any, is_made_up: Callable[[Tensor], bool]) -> Any:
    """A model's output of a class of its own as a dict of what it holds of tensors.

    What it hands on of a module that runs before the blocks, as the states of an
    encoder, is left out.
    """
    if not isinstance(output, dict) or type(output) is dict:
        return output
    return {
        key: held
        for key, held in output.items()
        if isinstance(held, Tensor) and not is_made_up(held)
    }


def _same(calls: list[Call], planned: list[Call]) -> bool:
    """True if two lists of calls hold equal tensors, without gradients."""
    ours, theirs = tensors_in(calls), tensors_in(planned)
    return len(ours) == len(theirs) and all(
        not a.requires_grad
        and a.dtype == b.dtype
        and a.shape == b.shape
        and (a is b or is_fake(a) or is_fake(b) or torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )
