"""Schedule files with wrong keys, types or counts: the message names the key."""

import json

import pytest

from zbpp.core import RequestError, parse_schedule, schedule_text
from zbpp.planning import plan

BASE = json.loads(schedule_text(plan("FThenB", n_stages=4, n_microbatches=5)))
WRONG_KEYS: dict[str, tuple[dict, str]] = {
    **{f"{k} null": ({k: None}, k) for k in BASE},
    **{f"{k} object": ({k: {}}, k) for k in BASE},
    **{
        f"{k} {value}": ({k: value}, k)
        for k in ("n_stages", "n_microbatches")
        for value in (-1, 0, 2.0, "2", True, [2])
    },
    "other format": ({"format": "plan"}, "format 'plan'"),
    "later version": ({"version": 2}, "version 2"),
    "stage too many": ({"n_stages": BASE["n_stages"] + 1}, "n_stages is"),
    "stage too few": ({"n_stages": BASE["n_stages"] - 1}, "n_stages is"),
    "micro-batch too many": ({"n_microbatches": 6}, "row 0, column"),
    "micro-batch too few": ({"n_microbatches": 4}, "row 0, column"),
    "empty placement": ({"placement": []}, "placement"),
    "gap in placement": ({"placement": [0, 1, 3, 4]}, "placement"),
    "negative stage": ({"placement": [-1, 0, 1, 2]}, r"placement\[0\] is -1"),
    "stage as text": ({"placement": ["0", 1, 2, 3]}, r"placement\[0\] is '0'"),
    "huge stage": ({"placement": [0, 10**15]}, "placement"),
    "chunk too many": ({"placement": [0, 1, 2, 3, 3]}, "row 3, column"),
    "stages exchanged": ({"placement": [1, 0, 2, 3]}, "row 0, column 0"),
    "no rows": ({"jobs": []}, "0 rows of jobs for 4 stages"),
    "row too few": ({"jobs": BASE["jobs"][:-1]}, "3 rows of jobs for 4 stages"),
    "row too many": ({"jobs": [*BASE["jobs"], []]}, "5 rows of jobs for 4 stages"),
    "rows exchanged": ({"jobs": BASE["jobs"][::-1]}, "row 0, column 0"),
    "row as text": ({"jobs": ["0F0,0BW0"] * 4}, "jobs is not a list of rows"),
    "unknown key": ({"stages": 4}, "unknown key 'stages'; the keys are format"),
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_a_wrong_key_is_named(name):
    change, named = WRONG_KEYS[name]
    with pytest.raises(RequestError, match=f"^my.json: (.|\n)*{named}"):
        parse_schedule(json.dumps(BASE | change), source="my.json")
    parse_schedule(json.dumps(BASE))


@pytest.mark.parametrize("key", BASE)
def test_a_missing_key_is_named(key):
    text = json.dumps({k: v for k, v in BASE.items() if k != key})
    with pytest.raises(RequestError, match=f"the key '{key}' is missing"):
        parse_schedule(text)


def test_broken_json_is_located():
    text = schedule_text(plan("ZBH1", n_stages=2, n_microbatches=2))
    parse_schedule(text)
    for end in range(0, len(text.rstrip()), 7):
        with pytest.raises(RequestError, match=r"line \d+, column \d+: no JSON"):
            parse_schedule(text[:end])
