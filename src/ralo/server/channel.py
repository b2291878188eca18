"""Between the engine's thread and the event loop: what the engine makes reaches the request that waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from ralo.engine import Engine
from ralo.jobs import Delta, Job, Made

PATIENCE_S = 0.02  # that the engine waits for the event loop at most
EVERY_S = 0.03  # in which an answer gets one event, where several requests are answered
MOST_UNREAD = 1 << 14  # tokens that are kept for a client that does not read


@dataclass(eq=False)
class Channel:
    """The answers to one request, which may have several prompts; choices are numbered through."""

    jobs: list[Job]
    count: int = field(init=False)  # answers
    _open: set[int] = field(init=False)  # those that are not finished
    _new: list[Delta] = field(default_factory=list)
    _unread: int = 0  # tokens of them
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _offsets: dict[Job, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at = 0
        for job in self.jobs:
            self._offsets[job] = at
            at += len(job.requests)
        self.count, self._open = at, set(range(at))

    def put(self, job: Job, delta: Delta) -> None:
        """Text that follows what is not read yet goes with it; a token with log-probabilities stays by itself."""
        choice, text = self._offsets[job] + delta.choice, delta.text
        if self._new and not delta.chosen:
            last = self._new[-1]
            if last.choice == choice and not last.chosen:
                text = self._new.pop().text + text
        self._new.append(Delta(choice, text, delta.finish, delta.chosen, delta.error))
        self._unread += 1
        self._wake.set()

    @property
    def overrun(self) -> bool:
        return self._unread > MOST_UNREAD

    def give_up(self) -> None:
        """What was not read is dropped, and its reader told so."""
        self._new = [Delta(i, "", "error", error="too much of this answer was not read") for i in sorted(self._open)]

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What came since the last time, until every answer is finished."""
        while self._open:
            await self._wake.wait()
            self._wake.clear()
            new, self._new, self._unread = self._new, [], 0
            self._open -= {delta.choice for delta in new if delta.finish}
            yield new


class Switchboard:
    """All open channels, and the times that a client sees."""

    def __init__(self, first_s: Callable[[float], None], between_s: Callable[[float], None]) -> None:
        self.engine: Engine
        self._channels: dict[Job, Channel] = {}
        self._latest: dict[Job, float] = {}
        self.loop = asyncio.get_running_loop()
        self._first_s, self._between_s = first_s, between_s
        self._sent = threading.Event()
        self._held: Made = []  # until the next event
        self._handed = 0.0  # when the last of it was

    def deliver(self, made: Made) -> None:
        """Called by the engine's thread, once a pass. Where all is handed over it waits until it is sent: the next pass
        needs every core, and a thread that loses its own in the middle of one holds up the others."""
        if ready := self._ready(made):
            self._sent.clear()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody is left to hear of it
                self.loop.call_soon_threadsafe(self._deliver, ready)
                if not self._held:
                    self._sent.wait(PATIENCE_S)

    def _ready(self, made: Made) -> Made:
        """What is sent now: where several requests share the cores, sending each token by itself would cost as much as
        making it. First and last ones do not wait."""
        self._held += made
        now, alone = time.perf_counter(), len({job for job, _ in made}) == 1
        if alone or now - self._handed >= EVERY_S:
            ready, self._held, self._handed = self._held, [], now
            return ready
        urgent = {job for job, delta in self._held if delta.finish or job not in self._latest}
        ready = [one for one in self._held if one[0] in urgent]
        self._held = [one for one in self._held if one[0] not in urgent]
        return ready

    def _deliver(self, made: Made) -> None:
        now = time.perf_counter()
        for job in dict.fromkeys(job for job, _ in made if job in self._channels):
            if job in self._latest:
                self._between_s(now - self._latest[job])
            else:
                self._first_s(now - job.asked_s)
            self._latest[job] = now
        for job, delta in made:
            if channel := self._channels.get(job):
                channel.put(job, delta)
                if channel.overrun:
                    channel.give_up()
                    self.close(channel)
        # The channels' readers wake in the loop's next round and write in the one after.
        self.loop.call_soon(self.loop.call_soon, self.loop.call_soon, self._sent.set)

    def open(self, jobs: list[Job]) -> Channel:
        """Hands jobs to the engine; all of them or none."""
        self.engine.submit(jobs)
        channel = Channel(jobs)  # in time: what the engine makes comes through the loop, which is here now
        self._channels |= dict.fromkeys(jobs, channel)
        return channel

    def close(self, channel: Channel) -> None:
        """Nobody listens any more: what is not finished ends."""
        for job in channel.jobs:
            self.engine.cancel(job)
            self._channels.pop(job, None)
            self._latest.pop(job, None)
