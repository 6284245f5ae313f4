"""Mailboxes of several stages in one process: what comes, and what is sent for it."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import masked_model
import pytest
import torch
import torch.distributed as dist
from masked_model import M, cut, make
from pool import Pool
from torch import Tensor, nn

from zbpp.core import Job, Pass, PassKind, TiedGradient, Value, What
from zbpp.runtime import PeerError, ShapeError
from zbpp.runtime.comm import shapes
from zbpp.runtime.comm.failures import Failures
from zbpp.runtime.comm.groups import Channel, Groups
from zbpp.runtime.comm.links import HEADER, KINDS, HostWaits, P2PLink, tag
from zbpp.runtime.comm.mailbox import Mailbox, StageLinks
from zbpp.runtime.comm.shapes import MAX_TENSORS
from zbpp.runtime.comm.transport import Opening
from zbpp.runtime.values import Tensors, as_tensors, as_value

CPU = torch.device("cpu")
N_SLOTS = 256

Mail = dict[tuple[int, int, int], deque[Tensor]]
"""Tensors under way, by source, target and tag."""


class MemoryGroup:
    """One member of a group; messages are told apart by tags, as gloo's."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self._rank, self._mail = rank, mail
        self.sent: list[int] = []
        """The slot of every tensor that was sent."""

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Any:
        self._mail[self._rank, target, tag].append(tensors[0].detach().clone())
        self.sent.append(tag % N_SLOTS)
        return MemoryWork(None, deque())

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        return MemoryWork(tensors[0], self._mail[source, self._rank, tag])

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 1  # whose connections nobody need break

    def shutdown(self) -> None:
        pass


class MemoryWork:
    """A message; a receive is done when one waits for it and a send has come."""

    def __init__(self, buffer: Tensor | None, mail: deque[Tensor]) -> None:
        self._buffer, self._mail = buffer, mail

    def wait(self, *_: object) -> None:
        if self._buffer is not None:
            if not self._mail:
                raise RuntimeError("nothing was sent")
            self._buffer.copy_(self._mail.popleft())

    def is_completed(self) -> bool:
        return self._buffer is None


def make_mailboxes(stage_of: Sequence[int]) -> tuple[list[Mailbox], list[MemoryGroup]]:
    """One mailbox for each stage, and the group that it sends by.

    Args:
        stage_of: stage of every chunk; stage 0 reads the inputs.
    """
    n = max(stage_of) + 1
    mail: Mail = defaultdict(deque)
    members = [MemoryGroup(rank, mail) for rank in range(n)]
    store = dist.HashStore()
    links = StageLinks(
        stage_of=stage_of,
        neighbours=[{s for s in (stage - 1, stage + 1) if s < n} for stage in range(n)],
        parents=[None, *range(n - 1)],
    )
    boxes = []
    for stage, member in enumerate(members):
        pairs = [(s, t) for s in range(n) for t in range(n) if stage in (s, t)]
        channels = {pair: Channel(member, *pair) for pair in pairs}
        groups = Groups(False, CPU, member, channels, store)
        failures = Failures(
            groups, stage, range(n), pipeline=range(n), device=CPU, timeout_s=60.0
        )
        link = P2PLink(groups, failures, HostWaits(failures))
        boxes.append(Mailbox(link, links, timeout_s=60.0))
    return boxes, members


def activation(chunk: int, microbatch: int = 0) -> Value:
    return Value(What.ACTIVATION, chunk, microbatch)


def forward(chunk: int, microbatch: int = 0) -> Job:
    return Pass(PassKind.F, chunk, microbatch)


def move(source: Mailbox, target: Mailbox, chunk: int, tensors: Tensors) -> Tensors:
    """Send what a chunk has put out, and receive it."""
    expected = target.post(activation(chunk), source.stage)
    source.send(activation(chunk), tensors, target.stage)
    return expected.receive(forward(chunk + 1))


def looks(thing: Any) -> str:
    return repr(thing) + str([t.requires_grad for t in as_tensors(thing)])


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3, requires_grad=True),
        (torch.ones(2), nn.Parameter(torch.ones(3, 4)), torch.arange(3)),
        {"text": 'a "quoted" \u2603', "none": None, "rate": float("inf"), "yes": True},
        [torch.ones(2, dtype=torch.bfloat16), (torch.tensor(True), [], ())],
        {f"layer {i}": torch.ones(2, i) for i in range(MAX_TENSORS)},
    ],
    ids=["tensor", "tuple", "plain", "nested", "many"],
)
def test_a_value_comes_as_it_was_sent(value: Any) -> None:
    (first, second), _ = make_mailboxes([0, 1])
    for box in (first, second):
        box.begin()
    with torch.no_grad():
        found = as_value(move(first, second, 0, as_tensors(value)))
    expected = value.detach().requires_grad_() if isinstance(value, Tensor) else value
    assert looks(found).replace("Parameter containing:\n", "") == looks(
        expected
    ).replace("Parameter containing:\n", "")
    for box in (first, second):
        box.end()


def train(
    boxes: list[Mailbox], members: list[MemoryGroup], lengths: list[int]
) -> list[Counter[str]]:
    """One step of two stages; what each has sent, by kind."""
    inputs = [(torch.ones(2, n, requires_grad=True),) for n in lengths]
    for member in members:
        member.sent.clear()
    first, second = boxes
    first.begin(Opening(len(lengths), inputs, 2))
    second.begin(Opening(len(lengths), n_targets=2))
    for i, tensors in enumerate(inputs):
        gradient = Value(What.GRADIENT, 1, i)
        expected = second.post(activation(0, i), 0)
        first.send(activation(0, i), tensors, 1)
        (found,) = expected.receive(forward(1, i))
        assert torch.equal(found, tensors[0]) and found.requires_grad
        expected = first.post(gradient, 1)
        second.send(gradient, (found.detach(),), 0)
        (back,) = expected.receive(Pass(PassKind.B, 0, i))
        assert back.shape == found.shape and not back.requires_grad
    for box in boxes:
        box.end()
    names = {HEADER: "header", KINDS: "kinds"}
    return [Counter(names.get(slot, "tensor") for slot in x.sent) for x in members]


def test_a_header_for_each_new_kind_and_no_other() -> None:
    boxes, members = make_mailboxes([0, 1])
    steps = [[5, 5], [5, 5], [3, 3], [5, 5], [3, 4], [4, 3]]
    for lengths, n_headers in zip(steps, [1, 0, 1, 0, 1, 0], strict=True):
        sent, returned = train(boxes, members, lengths)
        assert sent["header"] == n_headers
        assert sent["kinds"] == 1 and sent["tensor"] == 2
        assert returned["header"] == n_headers and returned["tensor"] == 2


def test_too_many_kinds_are_forgotten_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MAX_KINDS", 3)
    boxes, members = make_mailboxes([0, 1])
    steps = [1, 2, 3, 4, 5, 5, 1]
    headers = [train(boxes, members, [n])[0]["header"] for n in steps]
    assert headers == [1, 1, 1, 1, 1, 0, 1]


def test_an_evaluation_tells_all_shapes() -> None:
    boxes, members = make_mailboxes([0, 1])
    train(boxes, members, [5])
    for box in boxes:
        box.begin()
    for _ in range(2):
        move(*boxes, 0, (torch.ones(2, 5),))
    assert members[0].sent.count(HEADER) == 3


def test_a_shape_that_the_inputs_do_not_tell_is_refused() -> None:
    (first, second), _ = make_mailboxes([0, 1])
    assert first.begin(Opening(2, [(torch.ones(2, 3),)] * 2)) == 2
    assert second.begin(Opening(2)) == 2
    move(first, second, 0, (torch.ones(2, 3),))
    with pytest.raises(ShapeError, match="inputs of the same shapes it was float32"):
        first.send(activation(0, 1), (torch.ones(2, 4),), 1)
    with pytest.raises(ShapeError, match=r"is float64\[2, 3\], but with inputs"):
        first.send(activation(0, 1), (torch.ones(2, 3, dtype=torch.float64),), 1)
    nested = as_tensors({"x": torch.ones(2, 3), "mask": None})
    words = r"the .* is \{'x': float32\[2, 3\], 'mask': None\}, but with"
    with pytest.raises(ShapeError, match=words):
        first.send(activation(0, 1), nested, 1)


def test_a_tensor_that_is_handed_on_is_sent_to_a_stage_once() -> None:
    """
    chunk    0 --x, mask, mask--> 1   2 --x--> 3
    stage    0                    1   1        0
    """
    (first, second), members = make_mailboxes([0, 1, 1, 0])
    x, mask = torch.ones(2, requires_grad=True), torch.zeros(3)
    for box in (first, second):
        box.begin()
    value = {"x": x, "mask": mask, "again": [mask, None]}
    down = move(first, second, 0, as_tensors(value, {id(mask): (-1, 1)}))
    taken = as_value(down)
    assert taken["again"][0] is taken["mask"]
    up = as_tensors(taken, {id(taken["mask"]): (-1, 1)})
    found = as_value(move(second, first, 2, up))
    assert found["mask"] is mask and found["again"][0] is mask
    sent = [[slot for slot in member.sent if slot != HEADER] for member in members]
    assert sent == [[1, 2], [1]]
    for box in (first, second):
        box.end()


def test_what_cannot_be_sent_is_refused() -> None:
    (box, _), _ = make_mailboxes([0, 1])
    box.begin()
    for tensors, words in (
        ((torch.ones(2, 2).to_sparse(),), "layout sparse_coo cannot be sent"),
        ((torch.ones(1),) * (MAX_TENSORS + 1), "251 tensors are too many for one"),
        ((torch.ones(1).to(torch.float8_e5m2),), "float8_e5m2 cannot be sent"),
    ):
        with pytest.raises(ShapeError, match=words):
            box.send(activation(0), tensors, 1)


def test_a_message_that_does_not_come_is_named() -> None:
    (_, second), _ = make_mailboxes([0, 1])
    second.begin()
    second.doing = "step 7"
    expected = second.post(activation(0), 0)
    words = "stage 1 waits at 1F0 for .* from stage 0: the connection broke; rank 0 has"
    with pytest.raises(PeerError, match=words):
        expected.receive(forward(1))
    with pytest.raises(AssertionError, match="never received"):
        second.post(activation(0), 0)
        second.end()


def test_tags_differ_for_all_tensors_of_a_step() -> None:
    """Of an evaluation too, which has no gradients."""
    activations = [activation(chunk, i) for chunk in range(3) for i in range(3)]
    gradients = [Value(What.GRADIENT, value.chunk, 0) for value in activations]
    tied = [TiedGradient(tie, chunk) for tie in range(3) for chunk in range(3)]
    slots = [HEADER, *range(1, MAX_TENSORS + 1), KINDS]
    tags = [
        tag(value, slot, training=training)
        for slot in slots
        for value, training in [
            *((value, True) for value in {*activations, *gradients, *tied}),
            *((value, False) for value in activations),
        ]
    ]
    assert len(set(tags)) == len(tags)


def ragged() -> tuple[list[float], float]:
    """Every micro-batch of its own length, in another order each step."""
    pipeline = make("ZBV", None if torch.distributed.is_initialized() else 2)
    losses = []
    for step in range(4):
        parts = [cut(masked_model.batch(10 * step + i, 2)) for i in range(M)]
        losses.append(pipeline.step([x for x, _ in parts], [t for _, t in parts]).loss)
    return losses, pipeline.evaluate([x for x, _ in parts], [t for _, t in parts])


@pytest.mark.dist
def test_micro_batches_of_several_lengths_in_a_step(pool: Pool) -> None:
    assert pool.run(ragged, 2) == [ragged()] * 2
