"""What commands show: progress on stderr (only on a terminal), tables and one JSON line on stdout."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WIDEST = 1000  # columns of a table: a narrow terminal may break its lines, but no number is cut off


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[float], None] | None]:
    """A bar for work that reports its share done; None where nobody is watching."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


@contextlib.contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """Says what is being done, for work whose length is not known; silent where nobody is watching."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda what: status.update(what)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """First column to the left, the others to the right, as wide as it needs to be."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = Table(box=box.SIMPLE)
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        out.add_row(*row)
    if title:
        print(title)
    console = Console(width=WIDEST, highlight=False, markup=False, emoji=False)  # a path may look like markup
    sys.stdout.flush()  # we write, not rich: where the reader of our output has gone, it would end the program with 1
    with console.capture() as text:
        console.print(out)
    print(text.get(), end="")


def json_line(values: Any) -> None:
    """The last line of stdout under --json: one object."""
    print(json.dumps(values), flush=True)


def size(n: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if abs(n) < 999.5:  # which three digits would round to 1e+03
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
