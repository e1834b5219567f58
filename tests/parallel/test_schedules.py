"""Pipeline schedules: golden rows, the figures of an independent simulation, and what every schedule promises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtape.parallel.transforms.pipeline_schedules import KINDS, Schedule, ScheduleAction, schedule, warm_up


def words(row) -> str:
    return " ".join(map(str, row))


def test_golden_rows():
    assert [words(r) for r in schedule("1f1b", 2, 3).rows] == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert [words(r) for r in schedule("fthenb", 2, 3).rows] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert [warm_up(s, 4, 2) for s in range(4)] == [2, 2, 1, 0]
    assert [warm_up(s, 4, 8) for s in range(4)] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("kind", "ranks", "micros", "chunks", "time", "idle", "peak"),
    [
        ("fthenb", 4, 8, 1, 33.0, 9.0, (8, 8, 8, 8)),
        ("1f1b", 4, 8, 1, 33.0, 9.0, (4, 3, 2, 1)),
        ("zerobubble", 4, 8, 1, 27.0, 3.0, (4, 4, 4, 4)),
        ("interleaved", 4, 8, 2, 28.5, 4.5, (11, 9, 7, 5)),
        ("fthenb", 8, 32, 1, 117.0, 21.0, (32,) * 8),
        ("1f1b", 8, 32, 1, 117.0, 21.0, tuple(range(8, 0, -1))),
        ("zerobubble", 8, 32, 1, 103.0, 7.0, (8,) * 8),
        ("interleaved", 8, 32, 2, 106.5, 10.5, tuple(range(23, 8, -2))),
    ],
)
def test_time_and_activations(kind, ranks, micros, chunks, time, idle, peak):
    """Figures of another simulation of the same schedules, with F = I = W = 1."""
    found = schedule(kind, ranks, micros, chunks=chunks).simulate()
    assert (found.time, found.idle, found.peak) == (time, idle, peak)


@settings(deadline=None, max_examples=60, database=None)
@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_every_schedule_runs_and_holds_no_more_than_it_says(kind, p, m, v):
    if kind == "interleaved":
        m *= p
    else:
        v = 1
    made = schedule(kind, p, m, chunks=v).check()
    peak = made.simulate(1.0, 1.3, 0.7).peak
    bound = {
        "fthenb": [m] * p,
        "1f1b": [min(m, p - s) for s in range(p)],
        "interleaved": [min(m * v, 2 * (p - s - 1) + (v - 1) * p + 1) if v > 1 else min(m, p - s) for s in range(p)],
        "zerobubble": [min(m, p)] * p,
    }[kind]
    assert all(held <= most for held, most in zip(peak, bound, strict=True)), (peak, bound)
    ends = made.simulate().ends
    for a, end in ends.items():
        if a.kind in "BI":
            assert ends[ScheduleAction("F", a.stage, a.micro)] < end


def test_the_text_shows_every_action_once():
    text = schedule("interleaved", 2, 2, chunks=2).text()
    assert text.splitlines()[0].startswith("rank 0 | F0a F1a F0b F1b")
    assert schedule("fthenb", 1, 1).text() == "rank 0 | F0 B0 B0 |"


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        (("gpipe", 2, 2), {}, "one of fthenb"),
        (("1f1b", 2, 0), {}, "needs ranks, micro-batches"),
        (("1f1b", 0, 2), {}, "needs ranks"),
        (("1f1b", 2, 2), {"chunks": 2}, "chunks are for"),
        (("interleaved", 2, 3), {"chunks": 2}, "multiples of its 2 ranks"),
    ],
)
def test_bad_numbers(arguments, options, match):
    with pytest.raises(ValueError, match=match):
        schedule(*arguments, **options)


def test_check_finds_what_is_wrong():
    good = schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="missing or doubled"):
        Schedule("1f1b", 2, 2, (good.rows[0][:-1], good.rows[1])).check()
    with pytest.raises(ValueError, match="another's stage"):
        Schedule("1f1b", 2, 2, good.rows[::-1]).check()
    with pytest.raises(ValueError, match="for ever: rank 0 at B0"):
        Schedule("1f1b", 2, 2, ((good.rows[0][2], *good.rows[0][:2], good.rows[0][3]), good.rows[1])).check()
