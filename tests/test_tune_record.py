"""The record of a search: measured once, replayed as it was, in a file that is whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ralo.errors import RaloError
from ralo.tune import record as records
from ralo.tune.record import OutOfTime, Record

ABOUT = {"model": "abc", "threads": 2, "text": ""}


class Clock:
    """Time that passes only where a measurement says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(records, "time", clock)
    return clock


class Work:
    """Measurements that take `seconds` each, and count."""

    def __init__(self, clock: Clock, seconds: float = 1.0) -> None:
        self.clock, self.seconds, self.done = clock, seconds, 0

    def __call__(self) -> dict[str, Any]:
        self.done += 1
        self.clock.now += self.seconds
        return {"value": self.done, "list": [0.1, 1e-17]}


def never() -> dict[str, Any]:
    raise AssertionError("measured again")


def stored(path: Path, **changes: Any) -> Path:
    entry = {"took": 1.0, "found": {"value": 3}}
    path.write_text(json.dumps({"format": 1, "about": ABOUT, "measured": {"a": entry}} | changes))
    return path


# ---------------------------------------------------------------- once, and again


def test_what_is_known_is_not_measured_again(clock, tmp_path):
    work, path = Work(clock), tmp_path / "r.json"
    record = Record(path, ABOUT, 60)
    first = record.get("a", work)
    assert record.get("a", never) == first == {"value": 1, "list": [0.1, 1e-17]}
    assert (record.fresh, record.spent) == (1, 1.0)
    other = Record(path, ABOUT, 60)
    assert other.get("a", never) == first
    assert (other.fresh, other.spent) == (0, 1.0), "time of the record counts as spent, once"
    other.get("b", work)
    assert Record(path, ABOUT, 60).get("b", never) == {"value": 2, "list": [0.1, 1e-17]}


def test_what_is_given_out_does_not_change_the_record(clock):
    record = Record(None, ABOUT, 60)
    record.get("a", Work(clock))["value"] = 99
    assert record.get("a", never)["value"] == 1


def test_without_a_file_nothing_is_written(clock, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Record(None, ABOUT, 60).get("a", Work(clock))
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_that_fails_leaves_nothing(clock, tmp_path):
    record = Record(tmp_path / "r.json", ABOUT, 60)
    with pytest.raises(ZeroDivisionError):
        record.get("a", lambda: {"value": 1 // 0})
    assert record.known == {} and record.spent == 0 and not record.path.exists()


# ---------------------------------------------------------------- time


def test_out_of_time(clock):
    record, work = Record(None, ABOUT, 2.5), Work(clock)
    for name in "abc":  # the third begins before the time is up
        record.get(name, work)
    with pytest.raises(OutOfTime):
        record.get("d", work)
    assert work.done == 3 and record.spent > record.seconds
    assert record.get("a", never)["value"] == 1, "what was used already costs nothing"


def test_must_measures_even_so(clock):
    record, work = Record(None, ABOUT, 0.5), Work(clock)
    record.get("a", work)
    with pytest.raises(OutOfTime):
        record.get("b", work)
    assert record.get("b", work, must=True)["value"] == 2 and record.spent == 2


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 9.0])
def test_a_replay_stops_where_it_stopped(clock, tmp_path, seconds):
    def run(record: Record, measure: Any) -> list[str]:
        done = []
        try:
            for name in "abcdef":
                record.get(name, measure)
                done.append(name)
        except OutOfTime:
            pass
        return done

    path = tmp_path / "r.json"
    run(Record(path, ABOUT, 60), Work(clock))  # all are known
    done = run(Record(path, ABOUT, seconds), never)
    assert done == run(Record(None, ABOUT, seconds), Work(clock)) == list("abcdef")[: int(seconds) + 1]


def test_a_replay_may_use_what_must_be(clock, tmp_path):
    path = tmp_path / "r.json"
    first = Record(path, ABOUT, 60)
    first.get("a", Work(clock)), first.get("b", Work(clock))
    record = Record(path, ABOUT, 0.5)
    record.get("a", never)
    with pytest.raises(OutOfTime):
        record.get("b", never)
    assert record.get("b", never, must=True)["value"] == 1


# ---------------------------------------------------------------- the file


def test_the_file_is_replaced_as_a_whole(clock, tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    record = Record(path, ABOUT, 60)
    record.get("a", Work(clock))
    before = path.read_bytes()
    replaced = os.replace

    def cut(*args: Any) -> None:
        assert path.read_bytes() == before, "the file under its name was touched before the new one was complete"
        replaced(*args)

    monkeypatch.setattr(os, "replace", cut)
    record.get("b", Work(clock))
    assert path.read_bytes() != before and sorted(p.name for p in tmp_path.iterdir()) == ["r.json"]


def test_where_it_cannot_be_written(clock, tmp_path):
    record = Record(tmp_path / "no" / "r.json", ABOUT, 60)
    with pytest.raises(RaloError, match=r"r.json: cannot be written: No such file or directory$"):
        record.get("a", Work(clock))


def test_what_cannot_be_put_in_its_place_is_not_left_beside_it(clock, tmp_path):
    record = Record(tmp_path / "r.json", ABOUT, 60)
    (tmp_path / "r.json").mkdir()
    with pytest.raises(RaloError, match=r"r.json: cannot be written: Is a directory$"):
        record.get("a", Work(clock))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json"]


def test_a_full_disk(clock, tmp_path, monkeypatch):
    record = Record(tmp_path / "r.json", ABOUT, 60)
    record.get("a", Work(clock))
    before = record.path.read_bytes()

    def full(self: Path, text: str, **how: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RaloError, match=r"r.json: cannot be written: No space left on device$"):
        record.get("b", Work(clock))
    assert record.path.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"3", b"null", b"\xff\xfe\x00", b'{"format": 1}', b'{"format": 1, "measured": {}}',
        b'{"format": 1, "about": {}, "measured": {"a": 3}}', b'{"format": 1, "about": {}, "measured": {"a": {}}}',
        b'{"format": 1, "about": 3, "measured": {}}', b'{"format": 1, "about": {}, "measured": 3}',
        b'{"format": 1, "about": {}, "measured": {"a": ["took", "found"]}}',
        b'{"format": 1, "about": {}, "measured": {"a": {"took": "long", "found": {}}}}',
    ],
)  # fmt: skip
def test_a_damaged_file(tmp_path, text):
    (tmp_path / "r.json").write_bytes(text)
    with pytest.raises(RaloError) as error:
        Record(tmp_path / "r.json", ABOUT, 60)
    said = str(error.value)
    assert said == f"{tmp_path / 'r.json'}: is not a record of measurements; choose another --record"
    assert (tmp_path / "r.json").read_bytes() == text, "somebody else's file is left as it is"


def test_every_cut_of_a_file_is_refused_or_whole(tmp_path):
    whole = stored(tmp_path / "r.json").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "r.json").write_bytes(whole[:length])
        with pytest.raises(RaloError, match="is not a record of measurements"):
            Record(tmp_path / "r.json", ABOUT, 60)


def test_a_directory_in_its_place(tmp_path):
    with pytest.raises(RaloError, match="is not a record of measurements"):
        Record(tmp_path, ABOUT, 60)


@pytest.mark.parametrize("changes", [{"format": 2}, {"format": "1"}, {"measured": {"a": {"took": -1, "found": {}}}}])
def test_a_record_of_another_ralo(tmp_path, changes):
    with pytest.raises(RaloError, match=r"r.json: is a record of another ralo; choose another --record$"):
        Record(stored(tmp_path / "r.json", **changes), ABOUT, 60)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"model": "xyz"}, "was measured with model 'abc', not 'xyz'"),
        ({"threads": 4}, "was measured with threads 2, not 4"),
        ({"seed": 1}, "was measured with seed None, not 1"),
        ({"text": "x" * 500}, "was measured with text '', not 'xxxxxxxxxx"),
    ],
)
def test_a_record_of_something_else(tmp_path, now, message):
    with pytest.raises(RaloError) as error:
        Record(stored(tmp_path / "r.json"), ABOUT | now, 60)
    said = str(error.value)
    assert message in said and said.endswith("; choose another --record") and "\n" not in said and len(said) < 400
    assert Record(stored(tmp_path / "r.json"), ABOUT, 60).get("a", never) == {"value": 3}
