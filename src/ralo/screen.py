"""What commands show: progress on stderr (only on a terminal), tables and one JSON line on stdout."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any


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


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """First column to the left, the others to the right, as wide as it needs to be."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title or None, box=box.SIMPLE, title_justify="left")
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        out.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(out)


def json_line(values: Any) -> None:
    """The last line of stdout under --json: one object."""
    print(json.dumps(values), flush=True)


def size(n: float) -> str:
    for unit in ("B", "KB", "MB"):
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
