"""Progress reports of saves, merges and reshards to the scheduler, for the live page of the dashboard.

An idle process sends nothing. A busy one sends a message twice a second at most, from the client's event loop. Work
never waits for it: if the scheduler does not answer, only the page suffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import Any

from ...arrays.core.errors import ClusterError
from ...storage.base import activity
from .scheduler_plugin import MeshtapeScheduler
from .workers import PerClient, on_loop

EVERY = 0.5  # seconds between two messages
_PATIENCE = 5.0  # seconds that the last word may take


class Reporter:
    """The reports of one client. Underscored methods run on the client's event loop."""

    def __init__(self, client: Any) -> None:
        self._client = weakref.ref(client)
        self._sending = False
        self._woken = False
        self._known = False  # whether the scheduler has our plugin

    def wake(self) -> None:
        """Report that an activity began or ended. Called in any thread."""
        client = self._client()
        if client is None or client.status != "running":
            activity.forget(self.wake)
            return
        with contextlib.suppress(RuntimeError):  # the loop was just closed
            client.loop.add_callback(self._report)

    async def _report(self) -> None:
        self._woken = True
        if self._sending:
            return
        self._sending = True
        try:
            while self._woken or activity.busy():
                self._woken = False
                if not await self.send():
                    return
                await asyncio.sleep(EVERY)
        finally:
            self._sending = False

    async def send(self) -> bool:
        """Send one message. Returns whether there is still somebody to send to."""
        client = self._client()
        if client is None or client.status != "running":
            return False
        try:
            if not self._known:
                await client.register_plugin(MeshtapeScheduler())
                self._known = True
            await client.scheduler.meshtape_activity(
                name=client.id, written=activity.written(), activities=activity.news()
            )
        except Exception:  # lost, closed, without meshtape, or started anew: the page does without
            self._known = False
            return False
        return True


_reporter = PerClient(Reporter)


def follow(client: Any) -> None:
    """Report this process's activities to the scheduler of ``client``."""
    reporter = _reporter(client)
    activity.observe(reporter.wake)
    if activity.busy():
        reporter.wake()


def last_word(client: Any) -> None:
    """Report how every activity ended, before the client closes."""
    reporter = _reporter.made.get(client)
    if reporter is not None and activity.news() and client.status == "running":
        with contextlib.suppress(OSError, TimeoutError, ClusterError):
            on_loop(client, reporter.send, seconds=_PATIENCE)
