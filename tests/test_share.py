"""Shares: one dial becomes a share per place, spent where it hurts least, never more than what was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from ralo.modes.share import (
    FINE,
    GRID,
    HALF_TIME,
    KEEP_ALL,
    PART,
    TILE_TIME,
    TILES_FROM,
    TILES_WORTH,
    WORTH,
    Ways,
    allocate,
    costs,
    plain_share,
    share_cost,
    share_time,
    shares,
    ways,
)
from ralo.profile import Place, Profile

PLACES = ("qkv", "o", "up", "down")
SIZES = {(i, p): n for i in range(2) for p, n in zip(PLACES, (4, 2, 10, 5), strict=True)}
TIMED = [0.25, 0.5, 0.75, 1.0]
FEWER, ALL_HALVED = GRID < KEEP_ALL, (GRID >= KEEP_ALL) & (GRID < 1)  # lists of channels; all of them, by halves
TILED = float(GRID[ALL_HALVED][0])


def profile(
    scale: dict[tuple[int, str], float],
    seconds: dict[str, list[float]] | None = None,
    halved: dict[str, list[float]] | None = None,
    tiled: dict[str, float] | None = None,
    half: float | None = None,
) -> Profile:
    """KL falls tenfold with every 0.2 kept; `scale` says how much a place minds, `half` what halves of it cost."""
    levels = np.array([0.3, 0.5, 0.7], np.float32)
    coarse = np.array([] if half is None else [half], np.float32)
    places = {}
    for key in SIZES:
        kl = np.array([levels, scale.get(key, 1.0) * 10 ** (-levels / 0.2)], np.float32)
        places[key] = Place(
            np.ones(8, np.float32), np.ones((2, 8), np.float32), np.linspace(0, 1, 9, dtype="f4"), kl, coarse
        )
    times = [{p: np.array([TIMED, t], np.float32) for p, t in (each or {}).items()} for each in (seconds, halved)]
    return Profile("m", 1, places, *times, tiled or {})


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


# ---------------------------------------------------------------- by halves


BOTH, LISTS, IN_TILES = Ways(True, True), Ways(True, False), Ways(False, True)


def everywhere(way: Ways) -> dict[tuple[int, str], Ways]:
    return dict.fromkeys(SIZES, way)


def test_a_grid_has_one_share_of_all_by_halves() -> None:
    assert GRID[ALL_HALVED].tolist() == [TILED] and GRID[-1] == 1 and 0 < FINE < GRID[0]


@pytest.mark.parametrize("k", [0.05, 0.3, 0.5, 0.9, 0.96])
def test_without_a_profile_most_of_a_place_becomes_all_of_it_in_tiles(k: float) -> None:
    plain, found = shares(k, SIZES, None), shares(k, SIZES, None, by=everywhere(BOTH))
    for key, share in plain.items():
        assert found[key] == (share if share < TILES_FROM else max(share, KEEP_ALL)) < 1
    assert found == shares(k, SIZES, None, by=everywhere(IN_TILES))
    assert plain == shares(k, SIZES, None, by=everywhere(LISTS)) == shares(k, SIZES, None, by={})
    some = shares(k, SIZES, None, by={(0, "qkv"): BOTH})
    assert some == plain | {(0, "qkv"): found[0, "qkv"]}
    assert (found[0, "up"] > plain[0, "up"]) == (plain[0, "up"] >= TILES_FROM and plain[0, "up"] < KEEP_ALL)


def test_at_one_nothing_is_by_halves() -> None:
    for known in (None, profile({}, half=0.0, tiled=dict.fromkeys(PLACES, 0.0))):
        assert set(shares(1.0, SIZES, known, by=everywhere(BOTH)).values()) == {1.0}


def test_ways_are_open_where_nothing_was_measured() -> None:
    assert ways(None, "up") == ways(profile({}), "up") == BOTH
    assert ways(profile({}, {"o": TIMED}, {"o": [9.0] * 4}, {"o": 9.0}), "up") == BOTH, "of another place"
    assert ways(profile({}, {"up": TIMED}), "up") == BOTH
    assert Ways() == Ways(False, False)


@pytest.mark.parametrize(("part", "halves"), [(WORTH - 0.01, True), (WORTH + 0.01, False)])
@pytest.mark.parametrize(("tile_part", "tiles"), [(TILES_WORTH - 0.01, True), (TILES_WORTH + 0.01, False)])
def test_ways_that_save_too_little_are_closed(part: float, halves: bool, tile_part: float, tiles: bool) -> None:
    """Each by what it takes beside dense, whatever the other does."""
    dense = [1.0, 2.0, 3.0, 4.0]
    found = profile({}, {"up": dense}, {"up": [0.1, 0.2, 0.3, 4 * part]}, {"up": 4 * tile_part})
    assert ways(found, "up") == Ways(halves, tiles)
    assert ways(profile({}, {"up": dense}, {"up": [0.1, 0.2, 0.3, 4 * part]}), "up") == Ways(halves, True)
    assert ways(profile({}, {"up": dense}, tiled={"up": 4 * tile_part}), "up") == Ways(True, tiles)


def test_times_as_they_were_measured() -> None:
    known = profile({}, {"up": [1.0, 2.0, 3.0, 4.0]}, {"up": [0.75, 1.25, 1.75, 2.25]}, {"up": 2.125})
    whole, half = np.interp(GRID, TIMED, [1, 2, 3, 4]), np.interp(GRID, TIMED, [0.75, 1.25, 1.75, 2.25])
    np.testing.assert_allclose(share_time(known, "up", Ways()), whole)
    for way, lists in ((BOTH, half), (IN_TILES, whole)):
        found = share_time(known, "up", way)
        np.testing.assert_allclose(found[FEWER], lists[FEWER])
        assert found[ALL_HALVED].tolist() == [2.125] and found[-1] == 4.0
    found = share_time(known, "up", LISTS)
    np.testing.assert_allclose(found[FEWER], half[FEWER])
    assert found[-1] == 4.0, "all of it is dense"


@pytest.mark.parametrize("seconds", [None, {"up": [2.0, 4.0, 6.0, 8.0]}], ids=["bytes", "seconds"])
def test_times_that_were_not_measured(seconds: dict[str, list[float]] | None) -> None:
    """Parts of what as many whole channels take."""
    known, size = profile({}, seconds), 8.0
    whole = size * (np.maximum(GRID, TIMED[0]) if seconds else GRID)  # below what was measured it takes as long
    np.testing.assert_allclose(share_time(known, "up", Ways(), size), whole)
    found = share_time(known, "up", BOTH, size)
    np.testing.assert_allclose(found[FEWER], HALF_TIME * whole[FEWER])
    assert found[ALL_HALVED].tolist() == pytest.approx([TILE_TIME * size]) and found[-1] == pytest.approx(size)


def test_costs_of_halves() -> None:
    """A list by halves loses what it leaves out and what halves do; all channels by halves lose the latter alone."""
    half, key = 0.001, (0, "up")
    known = profile({}, half=half)
    least = 0.85 * 10 ** (-0.7 / 0.2)  # no place's own
    plain = share_cost(known, key, Ways())
    assert plain[-1] == 0 and (np.diff(plain) < 0).all()
    for way, more in ((BOTH, half - least), (IN_TILES, 0.0)):
        found = share_cost(known, key, way)
        np.testing.assert_allclose(found[FEWER], plain[FEWER] + more, rtol=1e-5)
        assert found[ALL_HALVED].tolist() == pytest.approx([half - least], rel=1e-5) and found[-1] == 0
    np.testing.assert_allclose(share_cost(known, key, LISTS)[FEWER], plain[FEWER] + half - least, rtol=1e-5)
    assert share_cost(known, key, LISTS)[-1] == 0
    for little in (least / 2, None):  # below what any change costs; not measured
        found = share_cost(profile({}, half=little), key, BOTH)
        np.testing.assert_array_equal(found[FEWER], plain[FEWER])
        assert (found[~FEWER] == 0).all()


def test_costs_of_many_places_are_those_of_each() -> None:
    known = profile({(1, "up"): 9.0}, {"up": [1.0, 2.0, 3.0, 4.0]}, tiled={"up": 2.0, "o": 0.5}, half=0.01)
    by = {(0, "up"): BOTH, (1, "up"): IN_TILES, (0, "o"): BOTH}
    c = costs(known, SIZES, {key: 0.5 if key[1] == "up" else 1.0 for key in SIZES}, by)
    for key, size in SIZES.items():
        way = by.get(key, Ways())
        np.testing.assert_array_equal(c.quality[key], share_cost(known, key, way))
        part = 0.5 if key[1] == "up" else 1.0
        np.testing.assert_array_equal(c.effort[key], part * share_time(known, key[1], way, size))


WHOLE = {p: [1.0, 2.0, 3.0, 4.0] for p in PLACES}
HALVED = {p: [0.9, 1.4, 1.9, 2.4] for p in PLACES}  # as a list all channels would take more than in tiles
KS = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def found_at(known: Profile) -> dict[float, dict[tuple[int, str], float]]:
    """Shares where each place is read as the profile says that it is worth it."""
    by = {key: ways(known, key[1]) for key in SIZES}
    return {k: shares(k, SIZES, known, by=by) for k in KS}


def test_all_by_halves_where_that_is_cheaper_and_better_than_a_list() -> None:
    minds = {key: 1.5**i for i, key in enumerate(SIZES)}
    known = profile(minds, WHOLE, HALVED, dict.fromkeys(PLACES, 1.75), half=1e-3)
    every = found_at(known)
    never = set(GRID[FEWER & (share_time(known, "up", BOTH) >= 1.75)])  # more time for more loss
    assert len(never) > 9 and not any(share in never for found in every.values() for share in found.values())
    c = costs(known, SIZES, dict.fromkeys(SIZES, 1.0), everywhere(BOTH))
    for k, found in every.items():
        lists = shares(k, SIZES, known, by=everywhere(LISTS))
        at = [{key: GRID.tolist().index(share) for key, share in each.items()} for each in (found, lists)]
        lost, took = ([sum(of[key][i] for key, i in each.items()) for each in at] for of in (c.quality, c.effort))
        assert TILED in found.values() and lost[0] < lost[1]
        assert took[0] <= sum(np.interp(plain_share(key[1], k), GRID, c.effort[key]) for key in SIZES) + 1e-6


def test_in_tiles_only_where_that_saves_time() -> None:
    """A place whose tiles take nearly dense's time is read as if it had none."""
    slow = TILES_WORTH * 4 + 0.01
    for more, taken in (({"qkv": slow, "o": slow}, {"up", "down"}), ({}, set(PLACES))):
        known = profile({}, WHOLE, HALVED, dict.fromkeys(PLACES, 1.75) | more, half=1e-3)
        every = found_at(known).values()
        assert {key[1] for found in every for key, share in found.items() if share == TILED} == taken


def test_lists_by_halves_only_where_they_save_enough() -> None:
    """Else they are read whole: they take their whole time then, and lose nothing by halves."""
    slow = {place: [0.9, 1.7, 2.5, 4 * WORTH + 0.01] for place in PLACES}
    known = profile({}, WHOLE, slow, half=0.5)
    by = {key: ways(known, key[1]) for key in SIZES}
    assert set(by.values()) == {IN_TILES}
    c, plain = (costs(known, SIZES, dict.fromkeys(SIZES, 1.0), each) for each in (by, None))
    for key in SIZES:
        np.testing.assert_array_equal(c.effort[key][FEWER], plain.effort[key][FEWER])
        np.testing.assert_array_equal(c.quality[key][FEWER], plain.quality[key][FEWER])
    assert all(s < KEEP_ALL or s == 1 for found in found_at(known).values() for s in found.values()), "0.5 is too much"


def test_a_share_asks_for_no_more_than_as_much_of_denses_time_where_there_are_tiles() -> None:
    """Lists that are slower than dense would else ask for more than dense, and nothing would be read in tiles."""
    slow, tiled = [3.0, 4.5, 6.0, 4.0], 3.3  # as `qkv` of a small model
    known = profile(
        {}, dict.fromkeys(PLACES, slow), {p: [9.0] * 4 for p in PLACES}, dict.fromkeys(PLACES, tiled), 0.001
    )
    by = {key: ways(known, key[1]) for key in SIZES}
    assert set(by.values()) == {Ways(False, True)}
    assert set(shares(0.7, SIZES, known, by=by).values()) == {TILED}  # 0.83 of dense, and 0.87 are asked for
    assert set(shares(0.2, SIZES, known, by=by).values()) == {TILED}  # never so little that tiles take more
    assert min(shares(0.7, SIZES, known).values()) > 0.3  # lists alone: no less is read because they are slow
    assert set(shares(1.0, SIZES, known, by=by).values()) == {1.0}
