"""A time budget per token: what each layer may do is decided from the clock, recorded, and can be done again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from ralo import _core
from ralo.errors import RaloError

LATE = 1.08  # of the budget: a token that took longer is late
RARE = 0.005  # share of tokens that may be late
STEP = 0.04  # of the budget: a late token makes the next ones so much faster
FIRST = 0.2  # of the budget that is kept back at first: one in a hundred may be late, and that is soon used up
MOST = 0.4  # of the budget that may be kept back
SMOOTH = 0.05  # of a new time in what is expected
WARM = 32  # tokens before it is said that a budget is too small
HEADER = "ralo event schedule"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Pace:
    """Keeps tokens within a budget of seconds. Holds some of it back, as much as keeps late tokens rare."""

    def __init__(
        self,
        pacer: _core.Pacer,
        budget_s: float,
        record: Path | None = None,
    ) -> None:
        self.pacer, self.budget_s, self.record = pacer, budget_s, record
        self.schedule: list[bytes] = []  # levels of every token's layers
        self.times: list[float] = []  # seconds of every token
        self._known: Iterator[bytes] | None = None
        self._held_back = FIRST  # part of the budget
        self._after = 0.0  # seconds of a token after its layers
        self._aside = 0.0  # seconds of the token to come that went to something else
        self._spent = 0.0  # and of the last one
        self._layers = 0.0
        if record:
            self._write("a", "")  # a place that cannot be written to is said before any work

    def replay(self, schedule: Sequence[bytes]) -> None:
        """From here on tokens get these levels, whatever the clock says."""
        self._known = iter(schedule)

    def aside(self, seconds: float) -> None:
        """So much of the token that begins is spent already."""
        self._aside += seconds

    def begin(self) -> None:
        self._spent, self._aside = self._aside, 0.0
        if self._known is not None:
            levels = next(self._known, None)
            if levels is None:
                raise RaloError(f"the recorded schedule ends after {len(self.schedule)} tokens: record a longer one")
            self.pacer.replay(list(levels))
        else:
            self.pacer.begin((1 - self._held_back) * self.budget_s - self._after - self._spent)

    def end(self) -> None:
        self._layers = self.pacer.end()
        dense = b"\0"  # layers that did not ask: the mode is switched off
        self.schedule.append(bytes(self.pacer.used).ljust(self.pacer.layers, dense))

    def took(self, seconds: float) -> None:
        """What the last token took in all, choosing it included."""
        self.times.append(seconds)
        after = min(seconds - self._layers - self._spent, self.budget_s)
        self._after += (after - self._after) * (SMOOTH if len(self.times) > 1 else 1.0)
        late = seconds > LATE * self.budget_s
        self._held_back = min(MOST, max(0.0, self._held_back + STEP * (late - RARE)))

    @property
    def mean_ms(self) -> float:
        return 1e3 * statistics.fmean(self.times) if self.times else 0.0

    @property
    def mean_level(self) -> float:
        levels = [level for token in self.schedule for level in token]
        return statistics.fmean(levels) if levels else 0.0

    @property
    def least_ms(self) -> float:
        """What a token takes with the least work."""
        return 1e3 * (float(self.pacer.least) + self._after)

    @property
    def note(self) -> str:
        """Where the budget cannot be kept: what can."""
        if len(self.times) < WARM or self.least_ms <= 1e3 * self.budget_s:
            return ""
        return f"budget {1e3 * self.budget_s:g} ms is less than the {self.least_ms:.1f} ms of the least work"

    def save(self) -> None:
        if self.record is None:
            return
        lines = ["".join(DIGITS[level] for level in token) for token in self.schedule]
        self._write("w", "\n".join([HEADER, *lines]) + "\n")

    def _write(self, how: str, text: str) -> None:
        assert self.record
        try:
            with self.record.open(how, encoding="ascii") as file:
                file.write(text)
        except OSError as error:
            raise RaloError(f"{self.record}: cannot be written: {error.strerror or error}") from error


def read_schedule(path: Path, layers: int, levels: int) -> list[bytes]:
    """Levels of every token's layers, as `Pace.save` wrote them."""
    try:
        header, *lines = path.read_text(encoding="ascii").splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise RaloError(f"{path}: {getattr(error, 'strerror', None) or 'is not a recorded schedule'}") from error
    known = DIGITS[:levels]
    if header != HEADER or any(len(line) != layers or set(line) - set(known) for line in lines):
        raise RaloError(f"{path}: is not a schedule of {layers} layers and {levels} levels (--event-record writes one)")
    return [bytes(known.index(c) for c in line) for line in lines]
