"""Waiting for descriptors: awake for a moment, asleep after it, and never in the way of other threads.

How long it stays awake is tried on a clock that the test moves: a busy machine must not change what is tested.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from meshtape.parallel.transports import spin_poller
from meshtape.parallel.transports.spin_poller import SpinPoller

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.mark.parametrize("eager", [True, False])
def test_what_is_ready_is_found_at_once_and_what_is_not_watched_is_not(ends, eager):
    a, b = ends
    waiter = SpinPoller()
    waiter.watch({a.fileno(): select.POLLIN, b.fileno(): select.POLLIN})
    b.send(b"x")
    assert waiter.wait(60, eager) == [a.fileno()]
    waiter.watch({b.fileno(): select.POLLIN})
    assert waiter.wait(0.01, eager) == []
    waiter.watch({a.fileno(): select.POLLIN | select.POLLOUT})
    assert waiter.wait(60, eager) == [a.fileno()]
    waiter.watch({})
    assert waiter.wait(0.01, eager) == []


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("after", [0.0, 0.05])
def test_what_comes_later_is_found(ends, eager, after):
    a, b = ends
    waiter = SpinPoller()
    waiter.watch({a.fileno(): select.POLLIN})
    sender = threading.Timer(after, b.send, (b"x",))
    sender.start()
    assert waiter.wait(60, eager) == [a.fileno()]
    sender.join()


def test_a_wait_that_stays_empty_takes_its_time(ends):
    waiter = SpinPoller()
    waiter.watch({ends[0].fileno(): select.POLLIN})
    for eager in (True, False, True):
        start = time.monotonic()
        assert waiter.wait(0.05, eager) == []
        assert time.monotonic() - start >= 0.045


class Clock:
    """Time that passes when a core is offered (``taken_for`` seconds each time) and while a wait sleeps; and what a
    wait finds when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.offered, self.taken_for, self.comes = 1000.0, 0, 1e-6, float("inf")
        monkeypatch.setattr(spin_poller, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(spin_poller, "os", SimpleNamespace(sched_yield=self.offer))

    def offer(self) -> None:
        self.offered += 1
        self.now += self.taken_for

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        until = self.now + milliseconds / 1000
        if self.comes <= until:
            self.now = max(self.now, self.comes)
            return [(0, select.POLLIN)]
        self.now = until
        return []

    def wait(self, waiter: SpinPoller, seconds: float, comes_after: float = float("inf")) -> tuple[list[int], int]:
        """What a wait finds, and how often it offered its core."""
        self.offered, self.comes = 0, self.now + comes_after
        return waiter.wait(seconds, True), self.offered


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def waiter(clock: Clock) -> SpinPoller:
    made = SpinPoller()
    made._poll = SimpleNamespace(poll=clock.poll)
    return made


def test_a_short_wait_is_found_awake(clock, waiter):
    found, offered = clock.wait(waiter, 60.0, comes_after=1e-4)
    assert found == [0]
    assert 99 <= offered <= 101
    assert clock.now == pytest.approx(1000.0 + 1e-4, abs=2e-6)


def test_long_waits_are_slept_through(clock, waiter):
    """The time awake shrinks while waits are long, to next to nothing, and comes back with the first short one."""
    awake = [clock.wait(waiter, 60.0, comes_after=1.0)[1] for _ in range(8)]
    assert awake[0] >= 990
    assert all(later <= earlier / 1.9 or later <= 22 for earlier, later in itertools.pairwise(awake))
    assert awake[-1] <= 22
    found, _ = clock.wait(waiter, 60.0, comes_after=1e-5)
    assert found == [0]
    assert clock.wait(waiter, 60.0, comes_after=1.0)[1] >= 990


def test_no_wait_outlasts_its_limit(clock, waiter):
    for seconds in (1e-4, 0.01, 1.0):
        start = clock.now
        assert clock.wait(waiter, seconds)[0] == []
        assert clock.now - start == pytest.approx(seconds, rel=0.01, abs=2e-6)


def test_where_others_need_the_core_the_next_waits_sleep_at_once(clock, waiter):
    clock.taken_for = 2 * spin_poller.CROWDED
    assert clock.wait(waiter, 0.01)[1] == 1
    assert [clock.wait(waiter, 0.001)[1] for _ in range(8)] == [0] * 8
    assert clock.wait(waiter, 0.01)[1] == 1  # looks whether it is still so
    assert [clock.wait(waiter, 0.001)[1] for _ in range(16)] == [0] * 16
    clock.taken_for = 1e-6
    assert clock.wait(waiter, 60.0, comes_after=1e-5)[0] == [0]
    assert clock.wait(waiter, 60.0, comes_after=1e-5)[1] > 0  # awake again


def test_other_threads_run_while_one_waits_awake(ends, monkeypatch):
    monkeypatch.setattr(spin_poller, "LONGEST", 30.0)
    monkeypatch.setattr(spin_poller, "CROWDED", 30.0)
    a, b = ends
    waiter = SpinPoller()
    waiter.watch({a.fileno(): select.POLLIN})
    beats = 0
    waits = threading.Event()

    def beat() -> None:
        nonlocal beats
        waits.wait()
        for _ in range(200):
            beats += 1
            time.sleep(0.0005)
        b.send(b"x")

    heart = threading.Thread(target=beat)
    heart.start()
    waits.set()
    assert waiter.wait(60, True) == [a.fileno()]
    heart.join()
    assert beats == 200
