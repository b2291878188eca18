"""Shares: one dial becomes a share per place, spent where it hurts least, never more than what was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from ralo.modes.share import GRID, PART, allocate, costs, plain_share, shares
from ralo.profile import Place, Profile

PLACES = ("qkv", "o", "up", "down")
SIZES = {(i, p): n for i in range(2) for p, n in zip(PLACES, (4, 2, 10, 5), strict=True)}


def profile(scale: dict[tuple[int, str], float], seconds: dict[str, list[float]] | None = None) -> Profile:
    """KL falls tenfold with every 0.2 kept; `scale` says how much a place minds."""
    levels = np.array([0.3, 0.5, 0.7], np.float32)
    places = {}
    for key in SIZES:
        kl = np.array([levels, scale.get(key, 1.0) * 10 ** (-levels / 0.2)], np.float32)
        places[key] = Place(np.ones(8, np.float32), np.ones((2, 8), np.float32), np.linspace(0, 1, 9, dtype="f4"), kl)
    times = {p: np.array([[0.25, 0.5, 0.75, 1.0], t], np.float32) for p, t in (seconds or {}).items()}
    return Profile("m", 1, places, times)


def bytes_of(found: dict[tuple[int, str], float]) -> float:
    return sum(SIZES[key] * share for key, share in found.items())


def test_without_a_profile() -> None:
    assert plain_share("down", 1.0) == plain_share("up", 1.0) == 1.0
    assert plain_share("down", 0.4) == pytest.approx(0.5, abs=0.01)
    assert plain_share("up", 0.4) == pytest.approx(0.82)
    assert shares(0.4, SIZES, None) == {key: plain_share(key[1], 0.4) for key in SIZES}
    assert set(PART) == set(PLACES)


@pytest.mark.parametrize("k", [0.2, 0.4, 0.6, 0.9])
def test_a_profile_spends_the_same_bytes(k: float) -> None:
    found = shares(k, SIZES, profile({}))
    plain = bytes_of(shares(k, SIZES, None))
    assert bytes_of(found) <= plain + 1e-6
    assert bytes_of(found) > plain - 0.04 * sum(SIZES.values())


def test_a_place_that_minds_keeps_more() -> None:
    found = shares(0.4, SIZES, profile({(1, "up"): 100.0}))
    assert found[1, "up"] > found[0, "up"]
    assert found[0, "down"] == found[1, "down"]


def test_all_is_kept_at_one() -> None:
    assert set(shares(1.0, SIZES, profile({})).values()) == {1.0}


def test_a_place_that_saves_no_time_keeps_everything() -> None:
    seconds = {p: [1.0, 2.0, 3.0, 4.0] for p in PLACES} | {"o": [4.0, 4.0, 4.0, 4.0]}
    found = shares(0.4, SIZES, profile({}, seconds))
    assert found[0, "o"] == found[1, "o"] == 1.0 and found[0, "up"] < 1


def test_allocation_beats_the_plain_one() -> None:
    scale = {(0, "qkv"): 30.0, (1, "down"): 10.0, (0, "up"): 0.1}
    c = costs(profile(scale), SIZES, dict.fromkeys(SIZES, 1.0))
    plain = shares(0.4, SIZES, None)
    found = allocate(c, bytes_of(plain))

    def quality(chosen: dict[tuple[int, str], float]) -> float:
        return sum(float(np.interp(share, GRID, c.quality[key])) for key, share in chosen.items())

    assert quality(found) < quality(plain)


def test_noise_in_what_was_measured_is_no_reward() -> None:
    """More kept never counts as worse, more read never as faster."""
    noisy = profile({}, {p: [1.0, 3.0, 2.0, 4.0] for p in PLACES})
    noisy.places[0, "up"].kl[1] = [0.1, 0.2, 0.01]
    c = costs(noisy, SIZES, dict.fromkeys(SIZES, 1.0))
    for key in SIZES:
        assert (np.diff(c.quality[key]) <= 1e-12).all() and (np.diff(c.effort[key]) >= 0).all()
