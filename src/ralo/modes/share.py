"""How a mode's one dial becomes a share per layer and place: by what skipping costs there, if that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo.profile import Profile

F64 = NDArray[np.float64]
Key = tuple[int, str]  # layer, place

GRID = np.round(np.arange(0.1, 1.0001, 0.02), 2)  # shares that are considered
KEEP_ALL = 0.97  # from this share on choosing costs more than it saves: all are kept, by halves in tiles
TILES_FROM = 0.75  # from this share on a list takes as long, where it was not measured
FINE = 0.03  # of channels that are read whole where the others are read by halves
HALF_TIME, TILE_TIME = 0.6, 0.55  # of the time of as many whole channels that those take, where it was not measured
WORTH = 0.8  # of dense's time: what takes longer as a list by halves is read whole
TILES_WORTH = 0.95  # and what takes longer in tiles is dense
# Without a profile: what a place skips of what the dial asks for. `down` and `o` bear much more than the others.
PART = {"qkv": 0.3, "o": 0.83, "up": 0.3, "down": 0.83}


def plain_share(place: str, k: float) -> float:
    return 1 - PART[place] * (1 - k)


@dataclass(frozen=True)
class Costs:
    """Per key, over its options (shares of GRID): the cost in quality (KL from dense), and in time or bytes."""

    quality: Mapping[Key, F64]
    effort: Mapping[Key, F64]


@dataclass(frozen=True)
class Ways:
    """How a place is read where not everything is: lists of channels mostly by halves; all of them by halves."""

    halves: bool = False
    tiles: bool = False


def ways(profile: Profile | None, place: str) -> Ways:
    """Of a place that can be read by halves: how it is worth it, as far as that was measured."""
    dense = float(profile.seconds[place][1, -1]) if profile and place in profile.seconds else None
    if profile is None or dense is None:
        return Ways(True, True)
    half, tiled = profile.halved.get(place), profile.tiled.get(place)
    return Ways(half is None or float(half[1, -1]) < WORTH * dense, tiled is None or tiled < TILES_WORTH * dense)


def costs(
    profile: Profile, sizes: Mapping[Key, int], parts: Mapping[Key, float], by: Mapping[Key, Ways] | None = None
) -> Costs:
    """Effort is the measured time of a place where the profile has it, else its bytes, times the part it is of. `by`:
    how places are read that can be read by halves."""
    quality, effort = {}, {}
    for key, size in sizes.items():
        way = (by or {}).get(key, Ways())
        quality[key] = share_cost(profile, key, way)
        effort[key] = parts[key] * share_time(profile, key[1], way, size)
    return Costs(quality, effort)


def share_time(profile: Profile, place: str, way: Ways, size: float = 1.0) -> F64:
    """Seconds over GRID; where they were not measured, bytes of a place of this size."""
    whole = times(profile.seconds[place]) if place in profile.seconds else size * GRID
    half = profile.halved.get(place)
    lists = whole if not way.halves else HALF_TIME * whole if half is None else times(half)
    kept = profile.tiled.get(place, TILE_TIME * float(whole[-1])) if way.tiles else lists
    out: F64 = np.where(GRID >= 1, whole[-1], np.where(GRID >= KEEP_ALL, kept, lists))
    return out


def head_pays(profile: Profile | None) -> bool:
    """Whether the head by halves is faster than dense, as far as that was measured."""
    return profile is None or not profile.head.size or float(profile.head[1]) < float(profile.head[0])


def share_cost(profile: Profile, key: Key, way: Ways) -> F64:
    """KL over GRID; of halves what they cost is added to what skipping does."""
    place, least = profile.places[key], floor(profile, key[0])
    half = max(0.0, float(place.half[0]) - least) if place.half.size else 0.0
    lists = _curve(place.kl, least) + (half if way.halves else 0.0)
    kept = half if way.tiles else lists
    out: F64 = np.where(GRID >= 1, 0.0, np.where(GRID >= KEEP_ALL, kept, lists))
    return out


def times(seconds: NDArray[np.float32]) -> F64:
    """Measured times over GRID; reading more never takes less, whatever a noisy moment said."""
    times: F64 = np.interp(GRID, seconds[0], np.maximum.accumulate(seconds[1]))
    return times


def floor(profile: Profile, layer: int) -> float:
    """What any change at all costs in a layer: rounding falls differently, which says nothing of a place."""
    return 0.85 * float(min(p.kl[1].min() for (i, _), p in profile.places.items() if i == layer))


def _curve(kl: NDArray[np.float32], least: float) -> F64:
    """KL over GRID from a few measured shares: straight in its logarithm, nothing at 1; `least` is no place's own."""
    at, value = kl[0].astype(float), np.log(np.maximum(kl[1].astype(float) - least, 1e-6))
    value = np.minimum.accumulate(value)  # noise may let a larger share look worse
    left, right = (value[1] - value[0]) / (at[1] - at[0]), (value[-1] - value[-2]) / (at[-1] - at[-2])
    out = np.interp(GRID, at, value)
    out = np.where(at[0] > GRID, value[0] + left * (GRID - at[0]), out)
    out = np.where(at[-1] < GRID, value[-1] + right * (GRID - at[-1]), out)
    curve: F64 = np.where(GRID >= 1, 0.0, np.exp(out))
    return curve


def allocate(c: Costs, budget: float) -> dict[Key, float]:
    """Shares with the least sum of quality costs whose effort is within the budget, one price for all places."""
    low, high = 1e-12, 1e12  # KL per unit of effort
    for _ in range(80):
        price = (low * high) ** 0.5
        if _effort(c, cheapest(c, price)) > budget:
            low = price
        else:
            high = price
    return {key: float(GRID[i]) for key, i in cheapest(c, high).items()}


def cheapest(c: Costs, price: float) -> dict[Key, int]:
    """At a price for effort, in KL: of every key the option that costs least in all."""
    return {key: int(np.argmin(c.quality[key] + price * c.effort[key])) for key in c.quality}


def _effort(c: Costs, choice: Mapping[Key, int]) -> float:
    return sum(float(c.effort[key][i]) for key, i in choice.items())


def _asked(effort: F64, share: float) -> float:
    """What a share takes; where a list of so many channels takes longer than all of them in tiles, as much of dense's
    effort, or what tiles take."""
    kept = float(effort[GRID >= KEEP_ALL][0])
    return min(float(np.interp(share, GRID, effort)), max(share * float(effort[-1]), kept))


def shares(
    k: float,
    sizes: Mapping[Key, int],
    profile: Profile | None,
    parts: Mapping[Key, float] | None = None,
    by: Mapping[Key, Ways] | None = None,
) -> dict[Key, float]:
    """A share per layer and place that together take what `plain_share` would take, spent where it hurts least."""
    plain = {key: plain_share(key[1], k) for key in sizes}
    if k >= 1:
        return plain
    if profile is None:
        tiled = {key for key, way in (by or {}).items() if way.tiles and plain[key] >= TILES_FROM}
        return {key: max(share, KEEP_ALL) if key in tiled else share for key, share in plain.items()}
    c = costs(profile, sizes, parts or dict.fromkeys(sizes, 1.0), by)
    budget = sum(_asked(c.effort[key], share) for key, share in plain.items())
    found = allocate(c, budget)
    return found if min(found.values(), default=0.0) < 1 else plain  # times of tiny matrices may say nothing
