"""What reaches a request of what the engine makes, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ralo.generate import Request
from ralo.jobs import Chosen, Delta, Job, Made
from ralo.sampling import Sampler, Sampling
from ralo.server import channel
from ralo.server.channel import Channel, Switchboard


class Idle:
    """An engine that takes everything and makes nothing."""

    def submit(self, jobs: list[Job]) -> None: ...
    def cancel(self, job: Job) -> None: ...


def job(answers: int = 1) -> Job:
    return Job([Request([1], Sampler(Sampling(temperature=0))) for _ in range(answers)])


def run(test: Callable[[Switchboard], Awaitable[None]]) -> None:
    async def main() -> None:
        board = Switchboard(lambda s: None, lambda s: None)
        board.engine = Idle()  # type: ignore[assignment]
        await test(board)

    asyncio.run(main())


async def deliver(board: Switchboard, made: Made) -> None:
    """As the engine's thread does."""
    await asyncio.to_thread(board.deliver, made)


def texts(of: Channel) -> list[str]:
    """What its reader would find now."""
    new, of._new, of._unread = of._new, [], 0
    return [delta.text for delta in new]


def token(one: Job, text: str, finish: str = "") -> tuple[Job, Delta]:
    return one, Delta(0, text, finish)


def test_several_requests_get_their_tokens_in_fewer_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "EVERY_S", 3600.0)

    async def test(board: Switchboard) -> None:
        a, b = job(), job()
        to_a, to_b = board.open([a]), board.open([b])
        await deliver(board, [token(a, "a0"), token(b, "b0")])
        assert (texts(to_a), texts(to_b)) == (["a0"], ["b0"])  # the first ones at once
        await deliver(board, [token(a, "a1"), token(b, "b1")])
        await deliver(board, [token(a, "a2"), token(b, "b2")])
        assert (texts(to_a), texts(to_b)) == ([], [])
        await deliver(board, [token(a, "a3", "length"), token(b, "b3")])
        assert (texts(to_a), texts(to_b)) == (["a1a2a3"], [])  # the last one with all before it
        await deliver(board, [token(b, "b4")])
        assert texts(to_b) == ["b1b2b3b4"]  # alone now
        await deliver(board, [token(b, "b5")])
        assert texts(to_b) == ["b5"]

    run(test)


def test_held_tokens_come_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(board: Switchboard) -> None:
        a, b = job(), job()
        to_a, to_b = board.open([a]), board.open([b])
        monkeypatch.setattr(channel, "EVERY_S", 3600.0)
        for n in range(3):
            await deliver(board, [token(a, f"a{n}"), token(b, f"b{n}")])
        assert (texts(to_a), texts(to_b)) == (["a0"], ["b0"])
        monkeypatch.setattr(channel, "EVERY_S", 0.0)
        await deliver(board, [token(a, "a3"), token(b, "b3")])
        assert (texts(to_a), texts(to_b)) == (["a1a2a3"], ["b1b2b3"])

    run(test)


def test_one_request_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "EVERY_S", 3600.0)

    async def test(board: Switchboard) -> None:
        a = job(answers=2)
        to_a = board.open([a])
        for n in range(3):
            await deliver(board, [(a, Delta(0, f"x{n}")), (a, Delta(1, f"y{n}"))])
            assert texts(to_a) == [f"x{n}", f"y{n}"]

    run(test)


def test_what_is_not_read_yet_goes_together() -> None:
    async def test(board: Switchboard) -> None:
        a = job(answers=2)
        to_a = board.open([a])
        chosen = Chosen(7, -0.5, [])
        made = [Delta(0, "a"), Delta(0, "b"), Delta(1, "c"), Delta(0, "d", chosen=chosen), Delta(0, "e"), Delta(0, "f")]
        for delta in made:
            to_a.put(a, delta)
        assert texts(to_a) == ["ab", "c", "d", "ef"]

    run(test)


def test_tokens_that_nobody_reads_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_UNREAD", 5)

    async def test(board: Switchboard) -> None:
        a = job()
        to_a = board.open([a])
        for _ in range(5):
            await deliver(board, [token(a, "x")])
        assert not to_a.overrun
        await deliver(board, [token(a, "x")])
        assert [delta.error for delta in to_a._new] == ["too much of this answer was not read"]

    run(test)


def test_a_request_that_begins_and_goes_on_in_one_pass_is_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens stand first and last of what a pass made; the other one's still wait."""
    monkeypatch.setattr(channel, "EVERY_S", 3600.0)

    async def test(board: Switchboard) -> None:
        a, b = job(), job()
        to_a, to_b = board.open([a]), board.open([b])
        await deliver(board, [token(b, "b0")])
        assert texts(to_b) == ["b0"]
        await deliver(board, [token(a, "a0"), token(b, "b1"), token(a, "a1")])
        assert (texts(to_a), texts(to_b)) == (["a0a1"], [])

    run(test)
