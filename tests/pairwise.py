"""Parameter sets without the full cross product: few cases that hold every pair of values of any two parameters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairwise(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Greedy and seeded: of some random cases, each time the one that holds the most pairs not yet held."""
    rng = random.Random(0)
    slots = list(combinations(range(len(choices)), 2))
    left = {(i, j, a, b) for i, j in slots for a in choices[i] for b in choices[j]}
    cases = []
    while left:
        i, j, a, b = min(left, key=repr)  # one pair for certain, the rest by chance
        tries = [[rng.choice(c) for c in choices] for _ in range(40)]
        for case in tries:
            case[i], case[j] = a, b
        best = max(tries, key=lambda case: sum((i, j, case[i], case[j]) in left for i, j in slots))
        left -= {(i, j, best[i], best[j]) for i, j in slots}
        cases.append(tuple(best))
    return cases
