"""Turns whatever the tokenizers library throws, Rust panics included, into one clear line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ralo.errors import FormatError, RaloError


def one_line(error: BaseException) -> str:
    """The error's message on one line, short enough to read."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:200])
    return text if len(text) < 200 else text[:197] + "..."


@contextmanager
def library_errors(path: Path, blame: str = "not a usable tokenizer") -> Iterator[None]:
    """Blames the file for any failure inside the block."""
    try:
        yield
    except RaloError:
        raise
    except Exception as error:
        raise FormatError(path, f"{blame}: {one_line(error)}") from None
    except BaseException as error:
        # A panic in Rust derives from BaseException, so that `except Exception` would let it through.
        if type(error).__name__ != "PanicException":
            raise
        raise FormatError(path, f"{blame}: {one_line(error)}") from None
