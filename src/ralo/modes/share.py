"""How a mode's one dial becomes a share per layer and place: by what skipping costs there, if that is known."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo.profile import Profile

F64 = NDArray[np.float64]
Key = tuple[int, str]  # layer, place

GRID = np.round(np.arange(0.1, 1.0001, 0.02), 2)  # shares that are considered
KEEP_ALL = 0.97  # from this share on choosing costs more than it saves
FINE = 0.05  # of channels that are read whole where the others are read by halves
HALF_TIME = 0.6  # that they take then, where it was not measured
WORTH = 0.8  # of dense's time: what takes longer by halves is read whole
# Without a profile: what a place skips of what the dial asks for. `down` and `o` bear much more than the others.
PART = {"qkv": 0.3, "o": 0.83, "up": 0.3, "down": 0.83}


def plain_share(place: str, k: float) -> float:
    return 1 - PART[place] * (1 - k)


@dataclass(frozen=True)
class Costs:
    """Per key, over its options (shares of GRID): the cost in quality (KL from dense), and in time or bytes."""

    quality: Mapping[Key, F64]
    effort: Mapping[Key, F64]


def costs(
    profile: Profile, sizes: Mapping[Key, int], parts: Mapping[Key, float], halved: Collection[Key] = ()
) -> Costs:
    """Effort is the measured time of a place where the profile has it, else its bytes, times the part it is of.
    `halved`: places where what is kept is mostly read by halves unless it is everything."""
    quality, effort = {}, {}
    for key, size in sizes.items():
        quality[key] = share_cost(profile, key, key in halved)
        spent = times(profile.seconds[key[1]]) if key[1] in profile.seconds else size * GRID
        if key in halved:
            half = profile.halved.get(key[1])
            spent = np.where(GRID < 1, HALF_TIME * spent if half is None else times(half), spent)
        effort[key] = parts[key] * spent
    return Costs(quality, effort)


def halves_pay(profile: Profile | None, place: str) -> bool:
    """Whether reading a place by halves takes WORTH of dense's time or less, as far as that was measured: where
    matrices are small it may not."""
    half, whole = (profile.halved.get(place), profile.seconds.get(place)) if profile else (None, None)
    return half is None or whole is None or float(half[1, -1]) < WORTH * float(whole[1, -1])


def head_pays(profile: Profile | None) -> bool:
    """Whether the head by halves is faster than dense, as far as that was measured."""
    return profile is None or not profile.head.size or float(profile.head[1]) < float(profile.head[0])


def share_cost(profile: Profile, key: Key, halved: bool) -> F64:
    """KL over GRID; of halves what they cost is added to what skipping does."""
    place, least = profile.places[key], floor(profile, key[0])
    curve = _curve(place.kl, least)
    half = max(0.0, float(place.half[0]) - least) if halved and place.half.size else 0.0
    return np.where(GRID < 1, curve + half, curve)


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


def shares(
    k: float,
    sizes: Mapping[Key, int],
    profile: Profile | None,
    parts: Mapping[Key, float] | None = None,
    halved: Collection[Key] = (),
) -> dict[Key, float]:
    """A share per layer and place that together take what `plain_share` would take, spent where it hurts least."""
    plain = {key: plain_share(key[1], k) for key in sizes}
    if profile is None or k >= 1:
        return plain
    c = costs(profile, sizes, parts or dict.fromkeys(sizes, 1.0), halved)
    budget = sum(float(np.interp(plain[key], GRID, c.effort[key])) for key in sizes)
    found = allocate(c, budget)
    return found if min(found.values(), default=0.0) < 1 else plain  # times of tiny matrices may say nothing
