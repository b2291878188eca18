"""One model of many: what runs on a machine of a cluster."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ralo import _core, cpu
from ralo import profile as profiles
from ralo.batch.answer import Answers
from ralo.batch.lines import Answer, Question
from ralo.errors import RaloError
from ralo.lm import LoadOptions, load
from ralo.plan import Setup
from ralo.version import __version__

BLOCKS = 8  # that a worker has at once: they overlap, so that its passes stay full


class Same(NamedTuple):
    """What all workers must have in common for their answers to be one model's."""

    ralo: str = ""
    model: str = ""  # its fingerprint
    weights: str = ""


@dataclass(frozen=True)
class Loaded:
    """What a worker says of itself."""

    host: str
    error: str = ""  # why it cannot work
    same: Same = field(default_factory=Same)
    isa: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """What every worker is told."""

    model: LoadOptions
    setup: Setup
    texts: int  # at once
    folder: str  # where paths that are relative start

    @property
    def block(self) -> int:
        """Questions that are handed over together: all blocks make up twice the texts that run."""
        return max(1, 2 * self.texts // BLOCKS)


class Worker:
    """An actor whose methods run in threads. It says what is wrong instead of raising it: not every error travels."""

    def __init__(self, work: Work, sharers: int) -> None:
        self.work, self.sharers = work, sharers  # workers on one machine share its cores
        self._answers: Answers

    def load(self) -> Loaded:
        host, model = platform.node(), self.work.model
        with contextlib.suppress(OSError):
            os.chdir(self.work.folder)
        threads = model.threads or max(1, cpu.default_threads() // self.sharers)
        try:
            lm = load(**vars(replace(model, threads=threads)), setup=self.work.setup)
            self._answers = Answers(lm, self.work.texts, BLOCKS * self.work.block).__enter__()
        except (RaloError, OSError, MemoryError) as error:
            return Loaded(host, str(error) or "not enough memory")
        same = Same(__version__, profiles.fingerprint(lm.model.weights), lm.storage)
        return Loaded(host, "", same, _core.level(), tuple(lm.warnings))

    def answer(self, block: list[Question]) -> list[Answer]:
        return list(self._answers.of(block))
