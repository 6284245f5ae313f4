"""Zero-bubble pipeline parallelism in one file: torch alone, two processes, no zbpp.

    python examples/minimal_zb.py

A pipeline cuts a model into chunks and gives them to processes, called stages. A batch
is cut into micro-batches, which follow one another through the chunks. For each chunk
and each micro-batch there are three pieces of work:

    F   the forward pass
    B   the gradient of the chunk's input: the chunk before waits for it
    W   the gradients of the chunk's weights: not needed until the optimizer

Autograd computes B and W together. The whole idea of zero bubble is to take them apart,
and to run W where a stage would otherwise wait for another one (Qi et al., arXiv
2401.10241 and 2405.15362).

The file goes from top to bottom: the split of the backward, a model, two schedules
drawn by hand, one stage with its messages, and a comparison with a plain loop, to the
last bit: the products are autograd's, and are added in the order of micro-batches.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

N_STAGES, N_MICROBATCHES, N_STEPS, N_BLOCKS, DIM = 2, 4, 3, 8, 32
SAMPLES = 8  # of a micro-batch

# 1. Split the backward. y = x @ weight.T has two gradients, each a separate product:
#
#     dx = dy @ weight        B computes it at once
#     dweight = dy.T @ x      W computes it later: it needs x and dy, nothing else

WeightWork = list[tuple[nn.Parameter, Tensor, Tensor]]
"""The work of W: a weight, what its layer has read, the gradient of its output."""


class SplitMatmul(torch.autograd.Function):
    """``x @ weight.T``, whose backward leaves the weight's gradient to W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, put_off: WeightWork, x: Tensor) -> Tensor:
        """Multiply, and keep both factors for the backward."""
        ctx.save_for_backward(weight, x)
        ctx.put_off = put_off
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        """Compute the gradient of x; put that of the weight off."""
        weight, x = ctx.saved_tensors
        ctx.put_off.append((weight, x, dy))
        return None, None, dy @ weight


def split(model: nn.Module, put_off: WeightWork) -> None:
    """Let the linear layers of a model, which have no bias, put their W off."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            multiply = partial(SplitMatmul.apply, layer.weight, put_off)
            layer.forward = multiply  # type: ignore[method-assign]


def weight_pass(work: WeightWork) -> None:
    """W: compute the gradients that were put off, and add them up."""
    for weight, x, dy in work:
        gradient = dy.T @ x
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


# 2. A model, and data for it.


class Block(nn.Module):
    """A residual block; the norm has little work in its gradients, which stay in B."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape: (samples, DIM) to (samples, DIM)."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make_chunks(n_chunks: int) -> list[nn.Sequential]:
    """Build the whole model, with the same weights in every process."""
    torch.manual_seed(0)
    blocks, size = [Block() for _ in range(N_BLOCKS)], N_BLOCKS // n_chunks
    return [nn.Sequential(*blocks[i : i + size]) for i in range(0, N_BLOCKS, size)]


def batches() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield the inputs and targets of each step's micro-batches."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(N_STEPS):
        x = torch.randn(N_MICROBATCHES, SAMPLES, DIM, generator=generator)
        yield [(inputs, inputs.roll(1, dims=1)) for inputs in x]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """Share of a micro-batch in the mean over the batch."""
    return nn.functional.mse_loss(y, target) / N_MICROBATCHES


# 3. Two schedules, drawn by hand. A row is a stage, a cell is a unit of time, `.` is
# idle; 1B3 is chunk 1, B, micro-batch 3. A stage runs its row from left to right.

# One chunk a stage. 1B0 hands its gradient on without waiting for 1W0, and stage 1 ends
# with W's that it has put off. With B and W in one, stage 0 would idle for 3 cells.
ZB_H1 = """
0F0 0F1 .   0B0 0W0 0F2 0B1 0W1 0F3 0B2 0W2 0B3 0W3
.   1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1F3 1B3 1W2 1W3
"""
# Two chunks a stage: the model goes down the stages and comes back up, in a V. Stage 0
# has the first chunk and the last one, so its first B needs no message, and no stage
# idles between its first job and its last.
ZB_V = """
0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 0W0 3F2 3B2 3W2 0B1 0W1 3F3 3B3 3W3 0B2 0W2 0B3 0W3
.   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2 2B3 1B3 1W2 2W3 1W3
"""  # noqa: E501
SCHEDULES = {"ZB-H1": (ZB_H1, [0, 1]), "ZB-V": (ZB_V, [0, 1, 1, 0])}
"""Name: its picture, and the stage of every chunk."""

Job = tuple[int, str, int]
"""Chunk, kind, micro-batch; 1B3 is (1, "B", 3)."""


def job_of(cell: str) -> Job:
    """Read one cell of a picture."""
    return int(cell[0]), cell[1], int(cell[2])


def parse(picture: str) -> list[dict[int, Job]]:
    """Read a picture: for each stage, its jobs by the cell in which they stand."""
    rows = [enumerate(line.split()) for line in picture.strip().splitlines()]
    stages = [{t: job_of(cell) for t, cell in row if cell != "."} for row in rows]
    times = {job: t for jobs in stages for t, job in jobs.items()}
    for (chunk, kind, i), t in times.items():
        reads = {"F": [(chunk - 1, "F", i)], "W": [(chunk, "B", i)]}
        for job in reads.get(kind, [(chunk, "F", i), (chunk + 1, "B", i)]):
            if times.get(job, -1) >= t:  # the ends of the model have no neighbour
                raise ValueError(f"{(chunk, kind, i)} comes before {job} has ended")
    return stages


# 4. One stage: its chunks, what they have saved, and its messages.


class Stage:
    """Runs the jobs of the process ``rank``; ``placement`` has every chunk's stage."""

    def __init__(self, rank: int, placement: list[int]) -> None:
        self.rank, self.placement, self.last = rank, placement, len(placement) - 1
        model = dict(enumerate(make_chunks(len(placement))))
        self.chunks = {c: model[c] for c in model if placement[c] == rank}
        self.put_off: WeightWork = []  # by the B that runs
        split(nn.ModuleList(self.chunks.values()), self.put_off)
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # from F to B
        self.work: dict[tuple[int, int], WeightWork] = {}  # from B to W
        self.local: dict[Job, Tensor] = {}  # from one chunk of this stage to another
        self.sends: list[tuple[dist.Work, Tensor]] = []
        self.losses: dict[int, float] = {}  # where the last chunk is

    def step(self, jobs: list[Job], batch: list[tuple[Tensor, Tensor]]) -> None:
        """Run the jobs in their order, then wait until all is sent."""
        for chunk, kind, i in jobs:
            if kind == "F":
                self.forward(chunk, i, *batch[i])
            elif kind == "B":
                self.backward(chunk, i)
            else:
                weight_pass(self.work.pop((chunk, i)))
        while self.sends:
            self.sends.pop()[0].wait()
        self.work.clear()  # empty, unless --skip has left a W out

    def forward(self, chunk: int, i: int, inputs: Tensor, target: Tensor) -> None:
        """F: keep what B needs; hand the output on, or compute its loss."""
        x = self.take((chunk, "F", i), chunk - 1) if chunk > 0 else inputs
        y = self.chunks[chunk](x.requires_grad_(chunk > 0))
        if chunk < self.last:
            self.give((chunk + 1, "F", i), y.detach())
        else:
            y = loss_of(y, target)
            self.losses[i] = y.item()
        self.saved[chunk, i] = x, y

    def backward(self, chunk: int, i: int) -> None:
        """B: hand the gradient of the input on; leave those of the weights to W."""
        x, y = self.saved.pop((chunk, i))
        dy = self.take((chunk, "B", i), chunk + 1) if chunk < self.last else None
        torch.autograd.backward(y, dy)  # fills x.grad and put_off
        self.work[chunk, i] = self.put_off.copy()
        self.put_off.clear()
        if chunk > 0:
            self.give((chunk - 1, "B", i), x.grad)

    def give(self, reader: Job, value: Tensor) -> None:
        """Hand a value to the job that reads it, here or in the other process."""
        stage = self.placement[reader[0]]
        if stage == self.rank:
            self.local[reader] = value
        else:  # does not wait; the tensor must live until it is sent
            self.sends.append((dist.isend(value, stage, tag=tag_of(reader)), value))

    def take(self, reader: Job, source: int) -> Tensor:
        """Wait for the value that a job reads from the chunk ``source``."""
        stage = self.placement[source]
        if stage == self.rank:
            return self.local.pop(reader)
        value = torch.empty(SAMPLES, DIM)
        dist.recv(value, stage, tag=tag_of(reader))
        return value


def tag_of(reader: Job) -> int:
    """Give every message of a step a different number."""
    chunk, kind, i = reader
    return (2 * chunk + (kind == "B")) * N_MICROBATCHES + i


# 5. Train under each schedule, and compare with a plain loop.


def plain_loop(n_chunks: int) -> tuple[list[nn.Sequential], list[float]]:
    """Train the whole model by ``loss.backward()``; return it, and all losses."""
    chunks, losses = make_chunks(n_chunks), []
    model = nn.Sequential(*chunks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches():
        optimizer.zero_grad()
        for x, target in batch:
            loss = loss_of(model(x), target)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return chunks, losses


def is_equal(rank: int, name: str, skip: list[Job]) -> bool:
    """Train this process's chunks; tell whether all processes' are the plain ones."""
    picture, placement = SCHEDULES[name]
    jobs = [job for job in parse(picture)[rank].values() if job not in skip]
    stage, losses = Stage(rank, placement), []
    learned = nn.ModuleList(stage.chunks.values())
    optimizer = torch.optim.AdamW(learned.parameters(), lr=1e-2)
    for batch in batches():
        optimizer.zero_grad()
        stage.step(jobs, batch)
        optimizer.step()
        losses += [loss for _, loss in sorted(stage.losses.items())]
    chunks, plain_losses = plain_loop(len(placement))
    plain = nn.ModuleList(chunks[c] for c in stage.chunks)
    pairs = zip(learned.parameters(), plain.parameters(), strict=True)
    equal = [torch.equal(ours, theirs) for ours, theirs in pairs]
    equal.append(losses in ([], plain_losses))
    n_wrong = torch.tensor(equal.count(False))
    dist.all_reduce(n_wrong)
    if rank == 0:
        verdict = "NOT EQUAL to a plain loop" if n_wrong else "equal to the last bit"
        print(f"{name}: loss {plain_losses[-1]:.4f} in the end, {verdict}", flush=True)
    return not n_wrong


def run_process(rank: int, file: str, skip: list[Job]) -> None:
    """Be one stage of every schedule; exit with 1 where a bit differs."""
    torch.set_num_threads(1)
    minute = timedelta(minutes=1)
    dist.init_process_group("gloo", f"file://{file}", minute, N_STAGES, rank)
    equal = [is_equal(rank, name, skip) for name in SCHEDULES]
    dist.destroy_process_group()
    os._exit(not all(equal))  # an orderly end may abort in torch's threads


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--skip", type=job_of, nargs="*", default=[], metavar="0W1")
    skip = parser.parse_args().skip  # jobs that are left out, to see it fail
    start = multiprocessing.get_context("spawn").Process
    with tempfile.TemporaryDirectory() as folder:
        args = [(rank, f"{folder}/rendezvous", skip) for rank in range(N_STAGES)]
        processes = [start(target=run_process, args=one) for one in args]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    sys.exit(any(process.exitcode for process in processes))
