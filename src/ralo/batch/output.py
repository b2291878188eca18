"""The file of answers: whole lines, one for each id, one writer at a time; what is in it is not asked again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ralo.batch.lines import Answer, Known
from ralo.batch.values import read_object
from ralo.errors import RaloError

START = b'{"id": '  # of every line: what has another end of a file is not ours to cut
LONGEST = 64 << 20  # bytes of a line


class Output:
    """Opening it checks what is there, cuts off a line that was not finished, and takes out those with an error."""

    def __init__(self, path: Path, known: Mapping[str, Known]) -> None:
        self.path = path
        self.answered: set[str] = set()
        self._known = known
        self._place = Path(os.path.realpath(path))  # a link stays a link
        self._fd = _lock(path)
        try:
            self._take_up()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def write(self, answer: Answer) -> None:
        """One line, at once with the system: whatever ends this process, it stays."""
        self._put(self._fd, answer.line())
        if not answer.error:
            self.answered.add(str(answer.id))

    def _take_up(self) -> None:
        failed, end = 0, 0
        for number, line in self._lines():
            if not line.endswith(b"\n"):
                if not (line.startswith(START) or START.startswith(line)):
                    self._bad(number, "is no answer of ralo batch; give -o another file")
                break
            failed += not self._check(number, line)
            end += len(line)
        if failed:
            self._write_again()
        elif end < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, end)
        os.lseek(self._fd, 0, os.SEEK_END)

    def _check(self, number: int, line: bytes) -> bool:
        """Whether a line answers its question, or says why there is no answer."""
        try:
            values = read_object(line)
        except RaloError:
            values = {}
        if "id" not in values or not isinstance(values.get("text", values.get("error")), str):
            self._bad(number, "is no answer of ralo batch; give -o another file")
        key = str(values["id"])
        if key not in self._known:
            self._bad(number, f"answers the id {key!r:.60}, which is not among the prompts: give -o another file")
        if key in self.answered:
            self._bad(number, f"answers the id {key!r:.60} once more; delete one of the two lines")
        if "text" in values:
            self._check_seed(number, values, key)
            self.answered.add(key)
        return "text" in values

    def _check_seed(self, number: int, values: Mapping[str, Any], key: str) -> None:
        if values.get("seed") != self._known[key].seed:
            self._bad(number, f"was made with another seed than id {key!r:.60} has now: give -o another file")

    def _write_again(self) -> None:
        """Without the lines of errors: in a file beside it that takes its place, so that no moment loses an answer."""
        partial = self._place.with_name(self._place.name + ".partial")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):
                os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
            for _, line in self._lines():
                if line.endswith(b"\n") and "text" in read_object(line):
                    self._put(fd, line)
            os.fsync(fd)
            os.replace(partial, self._place)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            number = 0
            while line := file.readline(LONGEST):
                number += 1
                yield number, line

    def _put(self, fd: int, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(fd, line) :]
        except OSError as error:
            why = error.strerror or error
            raise RaloError(f"{self.path}: cannot be written: {why}; what is answered stays") from None

    def _bad(self, number: int, why: str) -> NoReturn:
        raise RaloError(f"{self.path}: line {number}: {why}")


def _lock(path: Path) -> int:
    if path.exists() and not path.is_file():
        raise RaloError(f"{path}: is no ordinary file: answers need one, to go on after an interruption")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        replaced = not os.path.samestat(os.fstat(fd), os.stat(path))  # by another that is at work on it
    except BlockingIOError:
        replaced = True
    except BaseException:
        os.close(fd)
        raise
    if replaced:
        os.close(fd)
        raise RaloError(f"{path}: another ralo batch writes it: wait for its end, or give -o another file")
    return fd
