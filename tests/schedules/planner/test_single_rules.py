"""The rules of the list scheduler of a line, each where it decides."""

from zbpp.schedules.planner.single.list_scheduler import Rules, list_schedule_line
from zbpp.schedules.planner.single.problem import Line


def rows(line: Line, ahead: int) -> list[str]:
    """Letters of the passes of two stages, with nothing but ``ahead`` allowed."""
    rules = Rules((ahead,) * 2, (0,) * 2, (0.0,) * 2, (0.0,) * 2)
    letters = [
        ["FBW"[kind] for kind in row] for row in list_schedule_line(line, rules).kinds
    ]
    return ["".join(row) for row in letters]


def line(n: int, b: tuple[float, float], w: tuple[float, float], m_w: float) -> Line:
    ones, memory, none = (1.0, 1.0), (2.0, 2.0), (0.0, 0.0)
    splits, peaks = (True, True), (ones, none, none)
    return Line(n, ones, b, w, (0.0,), ones, (m_w, m_w), memory, splits, *peaks)


def test_a_w_goes_before_a_b_that_comes_soon_if_an_f_lacks_its_memory() -> None:
    found = rows(line(3, (1.0, 2.0), (2.0, 1.0), 1.0), ahead=2)
    assert found == ["FFBWFBWBW", "FFBBWWFBW"]


def test_as_many_micro_batches_as_ahead_says_come_before_a_b_and_no_more() -> None:
    assert rows(line(2, (1.0, 1.0), (1.0, 1.0), 0.5), ahead=1) == ["FFBWBW", "FBFBWW"]
