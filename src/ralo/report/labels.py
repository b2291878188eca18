"""Names beside the marks of a chart, where there is room for them."""

from __future__ import annotations

from collections.abc import Sequence

from ralo.drawing import LINE, At, Mark, Stroke, Words

WIDE, NARROW = "mwMW@%&…", "iljtfrI.,:;|!'()-/ "  # letters, which take so many units in a wide common font:
ROOM = {**dict.fromkeys(WIDE, 11.8), **dict.fromkeys(NARROW, 4.8)}
RINGS = (9.0, 18.0, 30.0, 44.0, 58.0)  # how far from its mark a name may begin
SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -0.7), (1, 0.7), (-1, -0.7), (-1, 0.7))
LONGEST = 170.0  # units of a name; the table has the whole of it
Box = tuple[float, float, float, float]  # left, top, right, bottom


def width(text: str) -> float:
    """Units that it takes, rather too many than too few."""
    return sum(ROOM.get(c, 7.7 if c < "\u1100" else 13.0) for c in text)


def shortened(name: str, longest: float = LONGEST) -> str:
    kept = name[:200]
    while kept and width(kept) > longest:
        kept = kept[:-2].rstrip() + "…" if len(kept) > 2 else ""
    return kept


def around(point: At, reach: float) -> Box:
    x, y = point
    return x - reach, y - reach, x + reach, y + reach


def along(a: At, b: At) -> Box:
    """The box of a line across or up."""
    return min(a[0], b[0]) - 1, min(a[1], b[1]) - 1, max(a[0], b[0]) + 1, max(a[1], b[1]) + 1


def named(points: Sequence[tuple[At, str, str]], room: Box, lines: Sequence[Box]) -> list[Mark]:
    """The names (place, name, kind) that fit, each as near as may be: better not across `lines`, never on another.

    Where there is no room for all, the first ones have it.
    """
    marks, taken = list[Mark](), [around(at, 6) for at, _, _ in points]
    for (x, y), name, kind in points:
        text = shortened(name)
        found = None
        for ring, away in enumerate(RINGS):
            for dx, dy in SIDES:
                box = _box(x + dx * away, y + dy * away, width(text), dx)
                if _inside(box, room) and not any(_meet(box, other) for other in taken):
                    cost = ring + 1.5 * sum(_meet(box, line) for line in lines)
                    found = min(found or (cost, ring, box, dx), (cost, ring, box, dx))
        if found is None:
            continue
        _, ring, box, dx = found
        taken.append(box)
        left, top, right, bottom = box
        if ring:  # so far away that a line must lead there
            end = (min(max(x, left), right), min(max(y, top), bottom))
            marks.append(Stroke([(x, y), end], "soft", 0.75))
        at = {1: left, -1: right, 0: (left + right) / 2}[dx]
        marks.append(Words(at, bottom - 4, text, kind, {1: "start", -1: "end", 0: "middle"}[dx]))
    return marks


def _box(x: float, y: float, width: float, side: float) -> Box:
    left = x - (1 - side) / 2 * width
    return left, y - LINE / 2, left + width, y + LINE / 2


def _inside(box: Box, room: Box) -> bool:
    return room[0] <= box[0] and room[1] <= box[1] and box[2] <= room[2] and box[3] <= room[3]


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
