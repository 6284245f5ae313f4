"""The CSV that ``torch.distributed.pipelining`` loads and runs.

One row a rank, one cell a pass: ``<chunk><letter><micro-batch>``. torch's letters are
not ours: its ``B`` is the full backward, its ``I`` the input gradient. It adds the
transfers and the collectives of replicas itself, and leaves the optimizer to the
caller, so all of them are left out:

    runtime = _PipelineScheduleRuntime(stages, n_microbatches, loss_fn=loss_fn)
    runtime._load_csv("schedule.csv")        # torch 2.13; stage_index = our chunk
"""

from zbpp.core import KINDS, Job, Pair, Pass, Placement, Schedule


def to_torch_csv(schedule: Schedule) -> str:
    r"""Write a schedule in torch's ``compute_only`` format: n_stages lines, no header.

    >>> from zbpp.schedules import plan_zb_h1
    >>> to_torch_csv(plan_zb_h1(n_stages=1, n_microbatches=2))
    '0F0,0I0,0W0,0F1,0I1,0W1\n'
    """
    rows = (",".join(filter(None, map(_cell, order))) for order in schedule.orders)
    return "".join(f"{row}\n" for row in rows)


def _cell(job: Job) -> str:
    """Write a job as torch does; empty if it is no pass."""
    match job:
        case Pass(kind, chunk, microbatch):
            return f"{chunk}{KINDS[kind].torch}{microbatch}"
        case Pair(forward, backward):
            return f"({_cell(forward)};{_cell(backward)}){KINDS[job.kind].torch}"
    return ""


def torch_schedule_name(placement: Placement) -> str | None:
    """Name the schedule of torch whose placement of chunks is this one, if any.

    torchtitan places the chunks by that name, also where it runs a CSV. A name of
    another placement lets the ranks wait for messages that are never sent.

    >>> torch_schedule_name(Placement.wave(4))
    'ZBVZeroBubble'
    """
    p = placement.n_stages
    if placement == Placement.single(p):
        return "1F1B"
    if placement == Placement.wave(p):
        return "ZBVZeroBubble"
    if placement == Placement.interleaved(p, placement.n_chunks // p):
        return "Interleaved1F1B"
    return None
