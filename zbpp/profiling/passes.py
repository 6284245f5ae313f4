"""F, B and W of every chunk of one stage, and of every layer as a chunk of its own.

    chunk    F0 F1 B0 W0 F2 B1 W1 F3 B2 ...    one micro-batch ahead, as in a pipeline
    layers   F0 of each, B0 from the last on, W0 from the last on, F1 of each, ...
    nothing  F0 B0 W0 F1 ...                   a layer without work, on the same shapes

A round of the chunk and one of its layers take turns, so that a slow spell of the
machine hits both. No more forwards are in flight than in a step. Between layers the
graph is cut, as it is between chunks, so B and W of each are its own. What a cut costs
is timed by itself, with nothing between two cuts: the difference of the sum of the
layers and the chunk would be a small one of large numbers, which noise can turn round.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zbpp.profiling.capture import Given, begin, fresh, stage_like
from zbpp.profiling.stopwatch import Stopwatch
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.driver.build import Settings
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import Tensors

__all__ = ["PassTiming", "time_passes"]

WARM_UP = 2
_LEAST = 5
_SMALL_GRADIENT = 1e-3


class PassTiming:
    """The passes of one stage's chunks, timed.

    Args:
        chunks: of the stage.
        n_chunks: of the whole model.
        n_layers: likewise.
        options: of the stage.
        given: what the chunks read.
        step: number of the step, for seeds.
        watch: where the times go, as (kind, "chunk", "layer" or "nothing", number);
            the loss within F as ("loss", "layer", number). Of passes without work the
            number is 1.
        ahead: the stage holds two forwards at a time, or more.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        n_chunks: int,
        n_layers: int,
        options: Settings,
        microbatch: Given,
        step: int,
        watch: Stopwatch,
        ahead: bool = True,
    ) -> None:
        self._ahead = int(ahead)
        self._microbatch, self._step, self._watch = microbatch, step, watch
        self._options = options
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self._layers = {
            index: _alone(chunk, index, layer)
            for chunk in chunks
            for index, layer in chunk.numbered()
        }
        self._last = {"chunk": n_chunks - 1, "layer": n_layers - 1, "nothing": 2}
        self._whole = stage_like(options, chunks, n_chunks=n_chunks)
        self._single = stage_like(
            options,
            list(self._layers.values()),
            n_chunks=n_layers,
            loss_fn=self._timed_loss,
        )
        self._nothing = stage_like(options, [Chunk(1, 1, (_Nothing(),))], n_chunks=3)
        self._out: dict[tuple[str, int], Tensors] = {}
        self.out_bytes: dict[int, int] = {}
        """Of what each layer puts out, in bytes."""

    def run(
        self, rounds: int, *, most_s: float, any_of: Callable[[bool], bool] = bool
    ) -> int:
        """Time so many rounds after the warm-up, fewer if they take too long.

        Args:
            rounds: to count.
            most_s: seconds after which fewer will do.
            any_of: true for all processes whose layers have collectives with each
                other if it is for one: they run as many rounds.

        Returns:
            How many were counted.
        """
        n = WARM_UP + rounds
        stages = self._whole, self._single, self._nothing
        for stage in stages:
            begin(stage, self._microbatch, step=self._step, n_microbatches=n + 1)
        started = time.perf_counter()
        for chunk in self._chunks.values() if self._ahead else ():
            self._forward_chunk(chunk, 0)
        done = 0
        for i in range(n):
            if i == WARM_UP:
                self._watch.forget()
                self._finish()
                started = time.perf_counter()
            for chunk in self._chunks.values():
                self._round(chunk, i)
            done = i + 1
            self._finish()
            over = any_of(time.perf_counter() - started > most_s)
            if over and done >= WARM_UP + _LEAST:
                break
        for stage in stages:
            stage.discard()
        return done - WARM_UP

    def _round(self, chunk: Chunk, i: int) -> None:
        self._forward_chunk(chunk, i + self._ahead)
        self._backward(self._whole, "chunk", chunk.index, i)
        self._forward_layers(chunk, i)
        for index, _ in reversed(list(chunk.numbered())):
            self._backward(self._single, "layer", index, i, weights=False)
        for index, _ in reversed(list(chunk.numbered())):
            self._weights(self._single, "layer", index, i)
        self._pass_nothing(chunk, i)

    def _pass_nothing(self, chunk: Chunk, i: int) -> None:
        """Passes without work, on what the chunk's first layer puts out."""
        out = self._out["layer", chunk.first]
        if chunk.first == self._last["layer"] or not any(y.requires_grad for y in out):
            return
        self._out["nothing", 1] = self._watch.time(
            ("F", "nothing", 1), self._nothing.forward, 1, i, fresh(out)
        )
        self._backward(self._nothing, "nothing", 1, i)

    def _forward_chunk(self, chunk: Chunk, i: int) -> None:
        chunk_inputs = self._microbatch.of_chunk.get(chunk.index)
        inputs = None if chunk_inputs is None else fresh(chunk_inputs)
        self._out["chunk", chunk.index] = self._watch.time(
            ("F", "chunk", chunk.index), self._whole.forward, chunk.index, i, inputs
        )

    def _forward_layers(self, chunk: Chunk, i: int) -> None:
        chunk_inputs = self._microbatch.of_chunk.get(chunk.index)
        value = None if chunk_inputs is None else fresh(chunk_inputs)
        for index, _ in chunk.numbered():
            name, run = ("F", "layer", index), self._single.forward
            value = self._watch.time_pass("F", name, run, index, i, value)
            self._out["layer", index] = value
            self.out_bytes[index] = sum(y.nbytes for y in value)
            value = fresh(value)

    def _backward(
        self, stage: Stage, what: str, index: int, i: int, *, weights: bool = True
    ) -> None:
        out = self._out[what, index]
        gradients = None if index == self._last[what] else _gradients(out)
        name, run = ("B", what, index), stage.backward_input
        self._watch.time_pass("B", name, run, index, i, gradients)
        if weights:
            self._weights(stage, what, index, i)

    def _weights(self, stage: Stage, what: str, index: int, i: int) -> None:
        self._watch.time(("W", what, index), stage.backward_weight, index, i)

    def jobs(self) -> dict[int, list[tuple[str, Callable[[], object]]]]:
        """F, B and W of each chunk, once more, one to be called after the other."""
        begin(self._whole, self._microbatch, step=self._step, n_microbatches=1)
        jobs: dict[int, list[tuple[str, Callable[[], object]]]] = {}
        for index in self._chunks:
            last = index == self._last["chunk"]
            gradients = None if last else _gradients(self._out["chunk", index])
            jobs[index] = [
                ("F", partial(self._forward_given, index)),
                ("B", partial(self._whole.backward_input, index, 0, gradients)),
                ("W", partial(self._whole.backward_weight, index, 0)),
            ]
        return jobs

    def _forward_given(self, index: int) -> None:
        """F with what it receives, which the graph may hold; it sends its outputs."""
        chunk_inputs = self._microbatch.of_chunk.get(index)
        self._whole.forward(
            index, 0, None if chunk_inputs is None else fresh(chunk_inputs)
        )

    def _timed_loss(self, *args: object) -> Any:
        return self._watch.time(
            ("loss", "layer", self._last["layer"]), self._options.loss_fn, *args
        )

    def _finish(self) -> None:
        """Let a GPU catch up, so that a round's time is its own."""
        if runs_ahead(self._options.device):
            torch.accelerator.synchronize(self._options.device)

    def splits(self) -> bool:
        """True if W of some chunk has anything to do."""
        return self._whole.defers


def _alone(chunk: Chunk, index: int, layer: nn.Module) -> Chunk:
    """A layer as a chunk of its own, with its own parameters."""
    return Chunk(index, index, (layer,), calls={index: chunk.call(index)})


class _Nothing(nn.Module):
    """Hands on what it is given, with a graph of its own as every layer has."""

    def forward(self, inputs: object) -> object:
        return map_tensors(inputs, lambda tensor: tensor.view_as(tensor))


def _gradients(outputs: Tensors) -> Tensors:
    return tuple(
        torch.full_like(y, _SMALL_GRADIENT) for y in outputs if y.requires_grad
    )


def time_passes(
    timings: Mapping[int, PassTiming],
    rounds: int,
    most_s: float,
    any_of: Callable[[bool], bool],
) -> int:
    """Time the passes of all stages of this process; see `PassTiming.run`."""
    return min(
        timing.run(rounds, most_s=most_s, any_of=any_of) for timing in timings.values()
    )
