import pytest
import torch

from zbpp.training.fingerprint import combine, fingerprints

PARAMETERS = [
    ("layers.0.weight", torch.arange(6.0).view(2, 3)),
    ("layers.1.weight", torch.ones(4)),
    ("layers.10.weight", torch.tensor(2.0)),
]


def whole(parameters):
    return combine([fingerprints(parameters)])


def test_the_split_and_the_order_do_not_matter():
    one, two, three = PARAMETERS
    expected = whole(PARAMETERS)
    assert len(expected) == 64
    assert whole([three, one, two]) == expected
    assert combine([fingerprints([two]), {}, fingerprints([three, one])]) == expected


def test_it_is_the_same_on_every_machine():
    assert whole(PARAMETERS).startswith("40a54e1e64a06463")


@pytest.mark.parametrize(
    "changed",
    [
        ("layers.1.bias", torch.ones(4)),
        ("layers.1.weight", torch.ones(2, 2)),
        ("layers.1.weight", torch.ones(4, dtype=torch.float64)),
        ("layers.1.weight", torch.tensor([1, 1, 1, 1 + 2**-23])),
        ("layers.1.weight", torch.ones(4).view(torch.int32)),
    ],
    ids=["name", "shape", "dtype", "last bit", "same bits, other dtype"],
)
def test_every_change_shows(changed):
    assert whole([PARAMETERS[0], changed, PARAMETERS[2]]) != whole(PARAMETERS)


def test_strides_do_not_matter_but_values_do():
    square = torch.arange(4.0).view(2, 2)
    assert whole([("a", square.t().contiguous().t())]) == whole([("a", square)])
    assert whole([("a", square.t())]) != whole([("a", square)])


def test_half_precision_is_hashed_too():
    one = torch.ones(3, dtype=torch.bfloat16)
    assert whole([("a", one)]) != whole([("a", one * 2)])


def test_replicas_hold_the_same():
    part, other = fingerprints(PARAMETERS[:1]), {"layers.0.weight": "0"}
    assert combine([part, part]) == combine([part])
    with pytest.raises(RuntimeError, match=r"hold different parameters: .*layers\.0"):
        combine([part, other])
