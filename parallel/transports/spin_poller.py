"""The spin poller: waits for descriptors that spin for a moment, then sleep.

Waking a sleeping process takes 5 µs on idle hardware and 0.2 ms on a virtual machine, whose processor has to be woken
first. A message between two processes takes 10 µs, and in the chunks of a large one each process waits for the other
again and again. So a wait spins for about as long as waking would take before it sleeps (Karlin, Li, Manasse, Owicki:
Empirical studies of competitive spinning for a shared-memory multiprocessor, 1991: never more than twice the cost of
the best choice), and yields its core after each poll. If waits turn out to be long, the spin gets shorter. If others
take the core for long, which may keep it from the awaited process, the next waits sleep at once.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping

LONGEST = 1e-3
"""Seconds that a wait stays awake at most."""

SHORTEST = 2e-5

CROWDED = 1e-3
"""Seconds between two looks from which others are taken to need the core: a scheduler's turn. Alone it is a
microsecond; a thread of this process that has the interpreter meanwhile, like Dask's, makes it some tenths of a
millisecond."""

_FEWEST, _MOST = 8, 32


class SpinPoller:
    """Waits until one of several descriptors is ready."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        self._awake = LONGEST
        self._asleep = 0  # waits that sleep at once, as the machine is crowded
        self._pause = _FEWEST

    def watch(self, wanted: Mapping[int, int]) -> None:
        """Wait for these descriptors and events from now on, and for no others."""
        watched = self._watched
        if watched == wanted:
            return
        for fd in watched.keys() - wanted.keys():
            self._poll.unregister(fd)
        for fd, events in wanted.items():
            if watched.get(fd) != events:
                self._poll.register(fd, events)
        self._watched = dict(wanted)

    def wait(self, seconds: float, eager: bool) -> list[int]:
        """Descriptors that are ready; none when so many seconds have passed. ``eager``: awake at first."""
        if not eager or self._asleep:
            self._asleep = max(0, self._asleep - 1)
            found = self._poll.poll(1000 * seconds)
        else:
            found = self._poll.poll(0) or self._stay_awake(seconds)
        return [fd for fd, _ in found]

    def _stay_awake(self, seconds: float) -> list[tuple[int, int]]:
        poll = self._poll.poll
        found: list[tuple[int, int]] = []
        start = now = time.monotonic()
        until, longest_look = start + min(self._awake, seconds), 0.0
        while now < until and not found and longest_look < CROWDED:
            os.sched_yield()
            found = poll(0)
            before, now = now, time.monotonic()
            longest_look = max(longest_look, now - before)
        if longest_look < CROWDED:
            self._pause = max(self._pause // 2, _FEWEST)
        else:
            self._asleep, self._pause = self._pause, min(2 * self._pause, _MOST)
        if found:
            self._awake = LONGEST
            return found
        found = poll(1000 * max(0.0, seconds - (now - start)))
        took = time.monotonic() - start
        self._awake = LONGEST if took < LONGEST else max(self._awake / 2, SHORTEST)
        return found
