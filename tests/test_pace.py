"""A time budget per token: what is kept back, what is recorded, and what is said of files that are no record."""

from __future__ import annotations

from pathlib import Path

import pytest

from ralo.errors import RaloError
from ralo.pace import DIGITS, FIRST, LATE, MOST, RARE, STEP, WARM, Pace, read_schedule

BUDGET = 0.1
BACK = STEP * RARE  # of the budget: what a punctual token gives back of it


class Pacer:
    """Notes what it is asked for; its layers take `layers_s` and have the levels in `used`."""

    def __init__(self, layers_s: float = 0.05, used: tuple[int, ...] = (0, 3, 10), least: float = 0.01) -> None:
        self.layers_s, self.used, self.least, self.layers = layers_s, list(used), least, len(used)
        self.asked: list[float] = []
        self.replayed: list[list[int]] = []

    def begin(self, seconds: float) -> None:
        self.asked.append(seconds)

    def replay(self, levels: list[int]) -> None:
        self.replayed.append(levels)
        self.used = levels

    def end(self) -> float:
        return self.layers_s


def run(pace: Pace, seconds: float, tokens: int = 1) -> None:
    for _ in range(tokens):
        pace.begin()
        pace.end()
        pace.took(seconds)


def part(punctual: int) -> float:
    """The part of the budget that a token may use after so many that were in time."""
    return 1 - max(0.0, FIRST - punctual * BACK)


def test_the_first_tokens_keep_some_of_the_budget_back():
    pacer = Pacer()
    run(Pace(pacer, BUDGET), 0.05, 3)
    assert pacer.asked == pytest.approx([part(n) * BUDGET for n in range(3)])
    assert pacer.asked[0] == pytest.approx(0.8 * BUDGET)


def test_what_comes_after_the_layers_is_left_for_it():
    pacer = Pacer(layers_s=0.05)
    pace = Pace(pacer, BUDGET)
    run(pace, 0.06, 2)
    assert pacer.asked == pytest.approx([part(0) * BUDGET, part(1) * BUDGET - 0.01])
    run(pace, 0.07, 200)  # it takes longer now, which is learnt
    assert pacer.asked[-1] == pytest.approx(part(201) * BUDGET - 0.02, rel=1e-3)


def test_time_that_goes_to_something_else_is_taken_from_one_token():
    pacer = Pacer(layers_s=0.05)
    pace = Pace(pacer, BUDGET)
    run(pace, 0.05)
    pace.aside(0.02)
    run(pace, 0.07)  # of which the layers took as long as before
    run(pace, 0.05)
    assert pacer.asked == pytest.approx([part(0) * BUDGET, part(1) * BUDGET - 0.02, part(2) * BUDGET])
    pace.aside(0.02)
    pace.begin()  # of a token whose time is not told
    run(pace, 0.05)
    assert pacer.asked[-2:] == pytest.approx([part(3) * BUDGET - 0.02, part(3) * BUDGET])


def test_a_token_that_takes_for_ever_does_not_use_up_the_budgets_of_all():
    pacer = Pacer()
    pace = Pace(pacer, BUDGET)
    run(pace, 0.05, 20)
    run(pace, 1000.0)
    run(pace, 0.05, 100)
    assert pacer.asked[-1] > (part(120) - STEP) * 0.99 * BUDGET


def test_late_tokens_make_the_next_ones_faster_and_punctual_ones_let_go():
    pacer = Pacer(layers_s=0.2)
    pace = Pace(pacer, BUDGET)
    run(pace, 0.2)  # late, all of it in the layers
    run(pace, 0.2)
    assert pacer.asked[1] == pytest.approx((1 - FIRST - STEP * (1 - RARE)) * BUDGET)
    run(pace, 0.2, 50)
    assert min(pacer.asked) == pacer.asked[-1] == pytest.approx((1 - MOST) * BUDGET)
    pacer.layers_s = 0.05
    run(pace, 0.05, 500)
    assert (1 - MOST) * BUDGET < pacer.asked[-1] < BUDGET
    run(pace, 0.05, 2000)
    assert pacer.asked[-1] == pytest.approx(BUDGET)


def test_a_little_over_is_not_late():
    pacer = Pacer(layers_s=BUDGET * LATE * 0.999)
    run(Pace(pacer, BUDGET), pacer.layers_s, 50)
    assert pacer.asked == pytest.approx([part(n) * BUDGET for n in range(50)])


def test_what_is_kept_back_keeps_late_tokens_rare():
    """One in 1 / RARE may be late for ever: no more is kept back than at first."""
    pacer = Pacer()
    pace = Pace(pacer, BUDGET)
    for _ in range(20):
        pacer.layers_s = 0.5
        run(pace, 0.5)
        pacer.layers_s = 0.05
        run(pace, 0.05, round(1 / RARE) - 1)
    assert max(pacer.asked[-200:]) == pytest.approx((1 - FIRST) * BUDGET, rel=STEP)


def test_means():
    pace = Pace(Pacer(used=(1, 2, 3)), BUDGET)
    assert (pace.mean_ms, pace.mean_level) == (0.0, 0.0)
    run(pace, 0.05)
    run(pace, 0.07)
    assert pace.mean_ms == pytest.approx(60) and pace.mean_level == 2 and pace.times == [0.05, 0.07]


def test_a_budget_that_is_too_small_is_said():
    pace = Pace(Pacer(layers_s=0.15, least=0.12), BUDGET)
    run(pace, 0.16, WARM - 1)
    assert pace.note == ""
    run(pace, 0.16)
    assert pace.note == "budget 100 ms is less than the 130.0 ms of the least work"
    enough = Pace(Pacer(layers_s=0.15, least=0.05), BUDGET)
    run(enough, 0.16, 2 * WARM)
    assert enough.note == "" and enough.least_ms == pytest.approx(60)


def test_a_schedule_is_recorded_saved_and_read(tmp_path: Path):
    pacer, file = Pacer(), tmp_path / "levels"
    pace = Pace(pacer, BUDGET, record=file)
    run(pace, 0.05)
    pacer.used = [10, 9, 0]
    run(pace, 0.05)
    assert pace.schedule == [bytes([0, 3, 10]), bytes([10, 9, 0])] and file.read_text() == ""
    pace.save()
    assert file.read_text() == "ralo event schedule\n03a\na90\n"
    assert read_schedule(file, 3, 11) == pace.schedule
    again = Pacer()
    replayed = Pace(again, BUDGET)
    replayed.replay(read_schedule(file, 3, 11))
    run(replayed, 0.05, 2)
    assert again.replayed == [[0, 3, 10], [10, 9, 0]] and again.asked == []
    assert replayed.schedule == pace.schedule


def test_every_level_has_a_digit(tmp_path: Path):
    file = tmp_path / "levels"
    pace = Pace(Pacer(used=tuple(range(len(DIGITS)))), BUDGET, record=file)
    run(pace, 0.05)
    pace.save()
    assert read_schedule(file, len(DIGITS), len(DIGITS)) == pace.schedule


def test_nothing_is_saved_where_nobody_asked():
    pace = Pace(Pacer(), BUDGET)
    run(pace, 0.05)
    pace.save()


def test_no_tokens_are_a_schedule_too(tmp_path: Path):
    pace = Pace(Pacer(), BUDGET, record=tmp_path / "levels")
    pace.save()
    assert read_schedule(tmp_path / "levels", 3, 11) == []


def test_a_schedule_that_ends(tmp_path: Path):
    pace = Pace(Pacer(), BUDGET)
    pace.replay([bytes([0, 0, 0])])
    run(pace, 0.05)
    with pytest.raises(RaloError, match=r"^the recorded schedule ends after 1 tokens: record a longer one$"):
        pace.begin()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"03a\n",
        b"ralo event schedule 2\n03a\n",
        b"ralo event schedule\n03\n",
        b"ralo event schedule\n03a1\n",
        b"ralo event schedule\n03b\n",
        b"ralo event schedule\n03A\n",
        b"ralo event schedule\n03a\n\n000\n",
        b"ralo event schedule\n0 a\n",
    ],
)
def test_files_that_are_no_schedule(tmp_path: Path, text: bytes):
    file = tmp_path / "levels"
    file.write_bytes(text)
    with pytest.raises(RaloError) as error:
        read_schedule(file, 3, 11)
    said = f"{file}: is not a schedule of 3 layers and 11 levels (--event-record writes one)"
    assert str(error.value) == said


def test_files_that_cannot_be_read_or_written(tmp_path: Path):
    missing, binary = tmp_path / "missing", tmp_path / "binary"
    binary.write_bytes(b"ralo event schedule\n\xff\xfe\n")
    for path, said in (
        (missing, "No such file or directory"),
        (binary, "is not a recorded schedule"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(RaloError) as error:
            read_schedule(path, 3, 11)
        assert str(error.value) == f"{path}: {said}"
    with pytest.raises(RaloError, match=r"levels: cannot be written: No such file or directory$"):
        Pace(Pacer(), BUDGET, record=tmp_path / "nowhere" / "levels")
