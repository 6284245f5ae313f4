"""A replayed forward leaves the generator where the others have brought it."""

import torch
from small_model import make_pipeline

from zbpp.core import Pass, PassKind
from zbpp.runtime.replay import Replay


def test_a_replayed_forward_takes_no_number_of_the_others() -> None:
    pipeline = make_pipeline("1F1B", 1)
    executor = pipeline.stages.executors[0]
    replay = Replay(executor.stage, replays=True)
    job = Pass(PassKind.F, 0, 0)
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    replay.begin(may_rewind=True)
    with replay.forward(job):
        first = float(torch.rand(1))
    other = float(torch.rand(1))  # another stage of this process
    replay.rewind()
    with replay.forward(job):
        again = float(torch.rand(1))
    assert [first, other, float(torch.rand(1))] == expected
    assert again == first
    pipeline.close()
