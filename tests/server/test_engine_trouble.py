"""An engine in trouble: whatever fails is told to whom it concerns, and the next request finds a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from serving import inside, refused, soon

from ralo import LM
from ralo.engine import Engine
from ralo.errors import RaloError
from ralo.jobs import Closed, Job, Made

COMPLETIONS = "/v1/completions"
ENDLESS: dict[str, Any] = {"prompt": "the house", "max_tokens": 1 << 14, "temperature": 0}


@pytest.mark.parametrize("where", ["prefill", "find", "steps", "choose"])
@pytest.mark.parametrize("error", [RaloError("out of luck"), MemoryError(), ZeroDivisionError("oh")])
def test_trouble_is_told_and_the_next_request_finds_a_server(
    lm: LM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    error: Exception,
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise error

    told = {RaloError: "out of luck", MemoryError: "not enough memory"}.get(type(error), "something went wrong here")

    async def main() -> None:
        async with inside(lm, max_tokens=1 << 15) as app:
            engine = app.service.engine
            other = asyncio.create_task(app.post(COMPLETIONS, ENDLESS | {"max_tokens": 300}))
            await soon(lambda: engine.running == 1)
            with monkeypatch.context() as patch:
                if where == "choose":
                    patch.setattr("ralo.engine.Turn.choose", fail)
                else:
                    owner = {"prefill": lm.guard, "find": engine.prefixes, "steps": lm.guard}[where]
                    patch.setattr(owner, where, fail)
                for stream in (False, True):
                    async with asyncio.timeout(10):
                        answer = await app.post(COMPLETIONS, ENDLESS | {"prompt": "a sea", "n": 2, "stream": stream})
                    if stream:
                        assert told in answer.text and answer.text.endswith("data: [DONE]\n\n")
                    else:
                        refused(answer, 500, told)
            if where in ("prefill", "find"):  # this request's trouble alone
                assert (await other).json()["usage"]["completion_tokens"] == 300
            else:
                refused(await other, 500, told)
            assert (await app.post(COMPLETIONS, ENDLESS | {"max_tokens": 3})).status_code == 200
            await soon(lambda: engine.idle and not app.service.board._channels)

    asyncio.run(main())
    assert bool(caplog.records) == isinstance(error, ZeroDivisionError)  # what nobody foresaw is in the log


def test_an_engine_is_not_idle_while_a_prompt_is_on_its_way(lm: LM) -> None:
    made: Made = []
    engine = Engine(lm, made.extend)
    job = Job([lm.request("the house " * 50, 3, temperature=0)])
    seen = []
    prefill = lm.guard.prefill

    def watched(*args: Any) -> Any:
        seen.append((engine.idle, engine.waiting, engine.cache_bytes))
        return prefill(*args)

    lm.guard.prefill = watched  # type: ignore[method-assign]
    try:
        engine.start()
        engine.submit([job])
        while not engine.idle:
            pass
    finally:
        del lm.guard.prefill
        engine.stop()
    assert seen == [(False, 1, 0)]  # texts are not weighed while they are being made
    assert engine.cache_bytes > 0
    assert [delta.finish for _, delta in made] == ["", "", "length"]


def test_an_engine_that_has_stopped_takes_nothing(lm: LM) -> None:
    engine = Engine(lm, lambda made: None)
    engine.start()
    engine.stop()
    with pytest.raises(Closed, match="shutting down"):
        engine.submit([Job([lm.request("a", 1)])])

    async def main() -> None:
        async with inside(lm) as app:
            app.service.engine.stop()  # a request that was on its way when it stopped
            answer = await app.post(COMPLETIONS, ENDLESS)
            assert refused(answer, 503, "shutting down")["code"] == "shutting_down"
            assert "retry-after" in answer.headers

    asyncio.run(main())
