"""Questions over the machines of a Ray cluster, in blocks; a worker that dies gives its blocks back."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any

from ralo.batch.lines import Answer, Question
from ralo.batch.worker import BLOCKS, Loaded, Work, Worker
from ralo.errors import RaloError

TRIES = 3  # a block that so many workers died over is given up, and a place where so many died in a row
PATIENCE_S = 20.0  # before it is said that no worker is there yet
# Ray's own words would stand among the answers' figures on stdout; what matters of them is said here.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


@dataclass(eq=False)
class _Block:
    questions: list[Question]
    tries: int = 0


@dataclass(eq=False)
class _Hand:
    """A worker as the driver sees it."""

    actor: Any
    place: int  # of the workers that were asked for
    busy: int = 0
    ready: bool = False
    gone: bool = False


class Crew:
    """All workers. Ray starts them and carries what is said; who answers what is decided here."""

    def __init__(self, address: str, workers: int, work: Work) -> None:
        self.work = work
        self._ray = connect(address, workers)
        nodes = [n["NodeID"] for n in self._ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
        if not nodes:
            raise RaloError(f"the Ray cluster at {address} has no machine with CPUs yet (ray start --address)")
        self.workers = workers or len(nodes)
        self._places = [nodes[i % len(nodes)] for i in range(self.workers)]
        self._deaths = [0] * self.workers
        self._hands: list[_Hand] = []
        self._doing: dict[Any, tuple[_Hand, _Block | None]] = {}  # None: it loads its model
        self._first: Loaded | None = None
        self._levels: set[str] = set()

    def __enter__(self) -> Crew:
        for place in range(self.workers):
            self._hire(place)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ray.shutdown()

    def of(self, questions: Iterable[Question]) -> Iterator[Answer]:
        """As they get ready, in any order; each question once, whoever died over it."""
        rest, blocks = iter(questions), deque[_Block]()

        def more() -> bool:
            if not blocks and (some := list(islice(rest, self.work.block))):
                blocks.append(_Block(some))
            return bool(blocks)

        while True:
            while (hand := self._least_busy()) and more():
                self._give(hand, blocks.popleft())
            if not blocks and not any(block for _, block in self._doing.values()) and not more():
                return
            hand, block, said = self._next()
            if said is None:
                yield from self._lost(hand, block, blocks)
            elif block is None:
                self._welcome(hand, said)
            else:
                hand.busy -= 1
                self._deaths[hand.place] = 0
                yield from said

    def _hire(self, place: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._places[place]
        where = NodeAffinitySchedulingStrategy(node, soft=True)  # another where that one is lost
        actor = self._ray.remote(Worker).options(num_cpus=1, max_concurrency=BLOCKS, scheduling_strategy=where)
        hand = _Hand(actor.remote(self.work, self._places.count(node)), place)
        self._hands.append(hand)
        self._doing[hand.actor.load.remote()] = (hand, None)

    def _least_busy(self) -> _Hand | None:
        free = [hand for hand in self._hands if hand.ready and hand.busy < BLOCKS]
        return min(free, key=lambda hand: hand.busy, default=None)

    def _give(self, hand: _Hand, block: _Block) -> None:
        hand.busy += 1
        self._doing[hand.actor.answer.remote(block.questions)] = (hand, block)

    def _next(self) -> tuple[_Hand, _Block | None, Any]:
        """Whoever is done first, and what it says; None where it died."""
        from ray.exceptions import RayError, RayTaskError

        waits = not any(hand.ready for hand in self._hands)
        done, _ = self._ray.wait(list(self._doing), num_returns=1, timeout=PATIENCE_S if waits else None)
        if not done:
            print("ralo batch: waiting for workers to start and load the model", file=sys.stderr, flush=True)
            done, _ = self._ray.wait(list(self._doing), num_returns=1)
        hand, block = self._doing.pop(done[0])
        try:
            return hand, block, self._ray.get(done[0])
        except RayTaskError as error:
            raise RaloError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from None
        except RayError:
            return hand, block, None

    def _lost(self, hand: _Hand, block: _Block | None, blocks: deque[_Block]) -> Iterator[Answer]:
        if not hand.gone:
            self._replace(hand)
        if block is None:
            return
        block.tries += 1
        if block.tries < TRIES:
            blocks.appendleft(block)
            return
        for q in block.questions:
            yield Answer(q.id, q.sampling.seed, error=f"{TRIES} workers died over this prompt and those around it")

    def _replace(self, hand: _Hand) -> None:
        hand.gone = True
        self._hands.remove(hand)
        self._ray.kill(hand.actor)  # it may be there and out of reach
        self._deaths[hand.place] += 1
        if self._deaths[hand.place] < TRIES:
            print("ralo batch: a worker died, another takes its place", file=sys.stderr, flush=True)
            self._hire(hand.place)
        elif not self._hands:
            raise RaloError(
                f"every worker died {TRIES} times in a row: is there enough memory for the model on each machine?"
            )

    def _welcome(self, hand: _Hand, said: Loaded) -> None:
        if said.error:
            raise RaloError(f"on {said.host}: {said.error}")
        if self._first is None:
            self._first = said
            for warning in said.warnings:
                print(f"ralo: {warning}", file=sys.stderr)
        for what, ours, theirs in zip(said.same._fields, self._first.same, said.same, strict=True):
            if ours != theirs:
                places = f"{self._first.host} has {ours}, {said.host} {theirs}"
                raise RaloError(f"workers must have the same {what}: {places}")
        if self._levels and said.isa not in self._levels:
            levels = ", ".join(sorted({*self._levels, said.isa}))
            print(f"ralo: workers compute at several levels ({levels}): answers differ by rounding", file=sys.stderr)
        self._levels.add(said.isa)
        hand.ready = True


def connect(address: str, workers: int) -> Any:
    """Ray, connected to a cluster that runs, or to one of this process alone, which nobody else can reach."""
    local, host = address == "local", re.fullmatch(r"([^\s/]+):(\d{1,5})", address)
    if not (local or address == "auto" or host):
        raise RaloError(f"--ray must be auto, local or HOST:PORT, got {address!r:.60}")
    for name, value in QUIET.items():  # read when Ray is imported
        os.environ.setdefault(name, value)
    if local:  # the only way to loopback: else Ray listens at every address of this machine
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
    except ImportError:
        raise RaloError("batch --ray needs Ray: pip install 'ralo[ray]'") from None
    own: dict[str, Any] = {"num_cpus": max(1, workers), "include_dashboard": False, "object_store_memory": 128 << 20}
    try:
        if host:  # Ray itself would try for minutes
            socket.create_connection((host[1].strip("[]"), int(host[2])), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **(own if local else {}))
    except Exception as error:
        raise RaloError(f"no Ray cluster at {address}: {str(error).split('. ')[0]}") from None
    return ray
