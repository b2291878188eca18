"""What stands for weights from seeds: one number everywhere, another one for other weights; and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernels.test_seeds import SHAPES, Stored, matrix, stored
from reference import proc

from ralo import _core

SMALL = [s for s in SHAPES if s[0] <= 33]


def digest(s: Stored, oc: int) -> int:
    return matrix(s, oc).digest()


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_is_the_references_at_every_level_and_number_of_threads(any_level, threads, shape):
    for deltas in (True, False):
        s = stored(*shape, deltas)
        assert digest(s, shape[1]) == proc.digest(s.data, s.scales, s.tables, shape[1], *s[3:])


def test_the_bias_does_not_count():
    s = stored(17, 640, 5)
    assert matrix(s, 640, np.ones(640, np.float32)).digest() == digest(s, 640)


@pytest.mark.parametrize("name", ["data", "scales", "deltas"])
def test_every_bit_counts(name):
    s, rng, seen = stored(100, 192, 2), np.random.default_rng(3), set()
    array = getattr(s, name)
    places = rng.choice(8 * array.nbytes, 400, replace=False)
    for place in places:
        changed = array.copy()
        changed.view(np.uint8).reshape(-1)[place // 8] ^= 1 << place % 8
        seen.add(digest(s._replace(**{name: changed}), 192))
    assert len(seen) == len(places) and digest(s, 192) not in seen


def test_where_a_delta_is_counts():
    s, seen = stored(100, 192, 2), set()
    ends = set((s.starts[1:] - 1).tolist())
    free = [d for d in range(len(s.at)) if s.at[d] < 191 and (d in ends or s.at[d] + 1 < s.at[d + 1])]
    for d in free:
        moved = s.at.copy()
        moved[d] += 1
        seen.add(digest(s._replace(at=moved), 192))
    assert len(seen) == len(free) > 100 and digest(s, 192) not in seen
    starts = s.starts.copy()
    starts[1] -= 1  # the last delta of channel 0 goes to channel 1, which had none
    assert starts[1] < starts[2] == s.starts[1]
    assert digest(s._replace(starts=starts), 192) != digest(s, 192)


def test_every_entry_of_the_tables_that_is_looked_up_counts():
    """Columns of 1 and of 2 blocks: of the other tables nothing is read."""
    s, seen, entries = stored(100, 192, 2), set(), 0
    for n, j in ((0, 0), (1, 0), (1, 1)):
        for table in range(4):
            for half in range(16 if table < 3 else 4):
                changed = s.tables.copy()
                changed[n, j, table, half :: 16 if table < 3 else 4] += 1
                seen.add(digest(s._replace(tables=changed), 192))
                entries += 1
    assert len(seen) == entries and digest(s, 192) not in seen
    others = s.tables.copy()
    others[2:], others[0, 1:] = 0, 0
    assert digest(s._replace(tables=others), 192) == digest(s, 192)


def test_channels_do_not_change_places():
    """A sum over channels must not forget which is which."""
    s = stored(100, 192, 2, deltas=False)
    swapped = s._replace(data=s.data[::-1].copy(), scales=s.scales[::-1].copy())
    assert digest(swapped, 192) != digest(s, 192)


# ---------------------------------------------------------------- refusals


def zeros(
    ic=4,
    oc=256,
    data=(4, 128),
    scales=(4, 2),
    bias=None,
    tables=(4, 4, 4, 16),
    starts=(0, 0, 0, 0, 0),
    at=(),
    deltas=(),
):
    return _core.ProcMatrix(
        ic,
        oc,
        np.zeros(data, np.uint8),
        np.zeros(scales, np.uint16),
        None if bias is None else np.zeros(bias, np.float32),
        np.zeros(tables, np.int8),
        np.array(starts, np.uint32),
        np.array(at, np.uint16),
        np.array(deltas, np.uint16),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"oc": 255},
        {"oc": 0},
        {"oc": 64},  # two columns, one block
        {"oc": 576},  # more than four blocks a column
        {"oc": 65600, "data": (4, 64 * 300), "scales": (4, 300)},  # an output of a delta is 16 bits
        {"ic": 3},
        {"ic": 5},
        {"ic": 0, "data": (0, 128), "scales": (0, 2), "starts": (0,)},
        {"data": (4, 127)},
        {"data": (4, 0)},
        {"data": (4, 192)},
        {"data": (3, 128)},
        {"scales": (4, 1)},
        {"scales": (3, 2)},
        {"bias": 255},
        {"starts": (0, 0, 0, 0)},
        {"starts": (0, 0, 0, 0, 1)},
        {"starts": (1, 1, 1, 1, 1), "at": (5,), "deltas": (1,)},
        {"starts": (0, 2, 1, 1, 1), "at": (5,), "deltas": (1,)},
        {"starts": (0, 1, 0, 1, 1), "at": (5,), "deltas": (1,)},
        {"starts": (0, 1, 1, 1, 1), "at": (5,), "deltas": ()},
        {"starts": (0, 1, 1, 1, 1), "at": (256,), "deltas": (1,)},
        {"starts": (0, 2, 2, 2, 2), "at": (5, 5), "deltas": (1, 1)},
        {"starts": (0, 2, 2, 2, 2), "at": (6, 5), "deltas": (1, 1)},
    ],
    ids=str,
)
def test_wrong_matrices_are_refused(change):
    zeros()  # as it should be
    with pytest.raises(ValueError):
        zeros(**change)


def test_tables_of_another_shape_or_period_are_refused():
    with pytest.raises(TypeError):
        zeros(tables=(4, 4, 4, 15))
    s = stored(4, 192, 1)
    for half in range(4, 16):
        wrong = s.tables.copy()
        wrong[2, 1, 3, half] += 1
        with pytest.raises(ValueError, match="the last table must repeat every four"):
            matrix(s._replace(tables=wrong), 192)
        with pytest.raises(ValueError, match="the last table must repeat every four"):
            _core.SeedSearch(wrong, 28.0)


def rows(x=(1, 4), y=(1, 256)) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(x, np.float32), np.zeros(y, np.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.apply(*rows(x=(1, 5))),
        lambda w: w.apply(*rows(y=(1, 192))),
        lambda w: w.apply(*rows(y=(2, 256))),
        lambda w: w.apply_some(np.zeros(5, np.float32), np.zeros(1, np.uint32), np.zeros(256, np.float32)),
        lambda w: w.apply_part(np.zeros(4, np.float32), np.zeros(192, np.float32), 0, 64),
        lambda w: w.norms(np.zeros(5, np.float32)),
        lambda w: w.unpack(np.zeros((4, 192), np.float32)),
        lambda w: w.unpack(np.zeros((3, 256), np.float32)),
    ],
)
def test_wrong_inputs_are_refused(call: Callable[[_core.ProcMatrix], object]):
    with pytest.raises(ValueError):
        call(zeros())
