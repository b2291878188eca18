"""Winners whose weights are read by halves: the best of them whole, of the others the upper four bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernels.test_block import D, F, stream
from kernels.test_kwta_input import Half, near, only, top
from reference import halves, linear
from reference.rounded import LEVELS
from reference.rows import act

from ralo import _core
from ralo.matrix import Matrix

K, FINE = 30, 6
GOOD, ROUGH = 2e-4, 2e-2  # of the largest output: 16 bits of x, or one byte where one token meets upper halves


def split(matrix: Matrix) -> _core.Halves:
    upper, lower = (np.zeros((matrix.ic, matrix.oc // 2), np.uint8) for _ in range(2))
    return _core.Halves(matrix.core, upper, lower)


def slot(matrix: Matrix, k: float = K, fine: int = FINE, **others) -> _core.KwtaInput:
    """others: arguments of the slot that are not as a mode by halves has them."""
    settings = {
        "n": matrix.ic, "norms": None, "block": 1, "pick": "top", "amount": k, "temp": 1.0, "duty": 1, "seed": False,
        "renorm": False, "halves": split(matrix), "fine": fine,
    }  # fmt: skip
    return _core.KwtaInput(**(settings | others))


class Halved(Half):
    """An MLP of int8 weights that are read by halves in front of `up`, or of `down`."""

    def __init__(self, up: dict | None = None, down: dict | None = None) -> None:
        super().__init__("int8")
        self.slots = [None if s is None else slot(m, **s) for m, s in ((self.up, up), (self.down, down))]
        self.mlp.use(*self.slots, None)

    def halved(self, x: np.ndarray, ups: tuple[int, int] | None, downs: tuple[int, int] | None) -> np.ndarray:
        """With so many channels of up and of down kept, and of those fine; None is dense."""
        parts = best(self.up, self.input(x), *(ups or (D, D))) + self.up.bias
        h = act("silu", parts[self.up.slices["gate"]]) * parts[self.up.slices["up"]]
        return x[0, :D] + (best(self.down, h, *(downs or (F, F))) + self.down.bias)[:D]


def best(matrix: Matrix, x: np.ndarray, k: int, fine: int) -> np.ndarray:
    """The reference with the k largest kept and the largest of those fine."""
    kept, whole = (top(np.abs(x), n).astype(np.uint32) if n else np.empty(0, np.uint32) for n in (k, fine))
    return halves.apply(*halves.split(matrix.data), matrix.scales, x, kept, whole)


def one(level: str) -> float:
    return ROUGH if level in LEVELS else GOOD


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"fine": 0},
        {"fine": K},
        {"pick": "near", "guess": 0.3},
        {"pick": "near", "guess": 0.3, "fine_guess": 1.5},
        {"pick": "near", "guess": 0.01, "fine_guess": 100.0},
    ],
    ids=str,
)
def test_winners_by_halves_and_the_best_of_them_whole(level, threads, rule):
    x, counts = stream(1), (K, rule.get("fine", FINE))
    half = Halved(up=rule)
    near(half.run(x, 0, _core.LayerState())[0], half.halved(x, counts, None), one(level))
    half = Halved(down=rule)
    near(half.run(x, 0, _core.LayerState())[0], half.halved(x, None, counts), one(level))


def test_how_much_halves_change():
    """What the tests above tell apart: whole weights, and another number of fine channels, are further off."""
    half, x = Halved(up={}), stream(1)
    want = half.halved(x, (K, FINE), None)
    for other in ((K, K), (K, 0), (D, FINE)):
        with pytest.raises(AssertionError):
            near(half.halved(x, other, None), want, ROUGH)


def test_scores_are_weighed_by_norms(level):
    norms = np.linspace(0, 1, D, dtype=np.float32)
    half, x = Halved(up={"norms": norms}), stream(1)
    score = np.abs(half.input(x)) * norms
    kept, fine = (top(score, n).astype(np.uint32) for n in (K, FINE))
    up = halves.apply(*halves.split(half.up.data), half.up.scales, half.input(x), kept, fine) + half.up.bias
    h = act("silu", up[half.up.slices["gate"]]) * up[half.up.slices["up"]]
    want = x[0, :D] + (linear.unpack("int8", half.down.data, half.down.scales) @ h + half.down.bias)[:D]
    near(half.run(x, 0, _core.LayerState())[0], want, one(level))


@pytest.mark.parametrize("k", [D, D + 7, 10**6])
def test_all_that_win_are_a_list_like_any_other(level, k):
    half, x, state = Halved(up={"k": k}), stream(1), _core.LayerState()
    for past in range(33):  # far enough for two looks at how much the winners change
        near(half.run(x, past, state)[0], half.halved(x, (D, FINE), None), one(level))
    counts = half.slots[0].counts()
    assert [counts[name] for name in ("kept", "fine", "compared", "changed")] == [33 * D, 33 * FINE, 2, 0]


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("k", [K, 10**6])
@pytest.mark.parametrize("place", ["up", "down"])
def test_many_tokens_give_what_they_give_one_by_one(level, threads, place, k, tokens):
    together, single, x = Halved(**{place: {"k": k}}), Halved(**{place: {"k": k}}), stream(tokens)
    state, all_of = _core.LayerState(), {"up": D, "down": F}[place]
    found, _ = together.run(x, 3, _core.LayerState())
    for t in range(tokens):
        counts = (min(k, all_of), FINE)
        want = single.halved(x[t : t + 1], *((counts, None) if place == "up" else (None, counts)))
        near(found[t], want, GOOD)  # several at once have 16 bits, or floats
        near(single.run(x[t : t + 1], 3 + t, state)[0], want, one(level))
    ours, theirs = (next(s for s in h.slots if s).counts() for h in (together, single))
    for name in ("steps", "channels", "kept", "fine", "held"):
        assert ours[name] == theirs[name]
    assert ours["fine"] == tokens * FINE


@pytest.mark.parametrize("place", ["up", "down"])
def test_prompts_are_rounded_no_worse_than_dense_ones(level, place):
    """Where the CPU is faster at it; dense ones are off by 2 % of the largest output here."""
    half, x = Halved(**{place: {"k": 10**6}}), stream(40)
    exact, rounded = x.copy(), x.copy()
    half.mlp.run(exact, 0, True, _core.LayerState())
    half.mlp.run(rounded, 0, False, _core.LayerState())
    off = np.abs(rounded - exact)[:, :D].max() / np.abs(exact[:, :D]).max()
    assert off < 0.03 and (off > 0) == (level in LEVELS)


@pytest.mark.parametrize("k", [K, 10**6])
def test_bytes_counted_are_bytes_of_halves(level, k):
    half = Halved({"k": k}, {"k": k, "fine": 0})
    reads = [half.run(stream(1), past, _core.LayerState())[1] for past in range(3)]
    for matrix, s, fine in ((half.up, half.slots[0], FINE), (half.down, half.slots[1], 0)):
        row, counts = matrix.oc // 2 + 2 * matrix.oc // 64, s.counts()
        read = (min(k, matrix.ic) + fine) * row
        dense = matrix.data.nbytes + matrix.scales.nbytes
        assert (counts["bytes_read"], counts["bytes_skipped"]) == (3 * read, 3 * (dense - read))
        assert (counts["steps"], counts["channels"], counts["fine"]) == (3, 3 * matrix.ic, 3 * fine)
        assert counts["kept"] == 3 * min(k, matrix.ic)
    assert sum(reads) == sum(s.counts()["bytes_read"] for s in half.slots)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("place", [0, 1])
def test_a_planted_nan_is_computed_densely(level, tokens, place):
    half, x = Halved(*({} if i == place else None for i in range(2))), stream(tokens)
    half.slots[place].plant = True
    found, dense = half.run(x, 0, _core.LayerState())[0], half.run(x)[0]
    assert np.array_equal(found, dense) and half.slots[place].nonfinite == 1
    assert not np.array_equal(half.run(x, 0, _core.LayerState())[0], dense)
    assert half.slots[place].nonfinite == 1


def test_switched_off_or_without_state_it_is_dense(level):
    half, x = Halved(up={}), stream(1)
    dense = half.run(x)[0]
    half.slots[0].on = False
    assert np.array_equal(half.run(x, 0, _core.LayerState())[0], dense)
    near(dense, half.want(x, None, None), GOOD)


def test_zeros_among_the_fine(level):
    """Winners near a guess are never zeros, but the best may be: as many as are asked for."""
    half, x = Halved(up={"pick": "near", "guess": 0.3, "fine": 20}), stream(1)
    x[0, :D] *= only(D, np.array([2, 3, 11, 30, 39]))
    near(half.run(x, 0, _core.LayerState())[0], half.halved(x, (5, 5), None), one(level))
    assert half.slots[0].counts()["kept"] == 5


FEW_OF_MANY = """
import numpy as np
from kernels.test_block import normal, packed
from kernels.test_kwta_halves import split
from ralo import _core
n = 640
up, down = packed({"up": normal(64, n)}, "int8"), packed({"down": normal(n, 64)}, "int8")
mlp = _core.Mlp(_core.Norm(np.ones(n, np.float32), None, 1e-5), up.core, down.core, 64, False, "silu")
slot = _core.KwtaInput(n, None, 1, "near", 500, 1.0, 1, False, False, 1.0, split(up), 300)
mlp.use(slot, None, None)
x = np.zeros((1, n), np.float32)
x[0, [0, -1]] = 1
y, dense = x.copy(), x.copy()
mlp.run(y, 0, True, _core.LayerState())
mlp.run(dense, 0, True)
assert np.abs(y - dense).max() <= 1e-2 * np.abs(dense).max()
"""


def test_many_zeros_among_the_fine():
    """As above, with more of them between two winners than a block has channels. In a process of its own: what goes
    wrong here is not an exception."""
    done = subprocess.run([sys.executable, "-c", FEW_OF_MANY], cwd=Path(__file__).parents[1], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def of_up(**settings) -> None:
    slot(Half("int8").up, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"duty": 2}, "halves are chosen channel by channel"),
        ({"block": 16}, "halves are chosen channel by channel"),
        ({"renorm": True}, "halves are chosen channel by channel"),
        ({"seed": True}, "halves are chosen channel by channel"),
        ({"n": D + 1}, "the halves are of other channels"),
        ({"fine": K + 1}, "among a number of winners"),
        ({"pick": "mass", "amount": 0.5}, "among a number of winners"),
        ({"fine_guess": -1.0}, "the halves are of other channels"),
    ],
    ids=str,
)
def test_wrong_slots_are_refused(settings, message):
    of_up()  # as it should be
    with pytest.raises(ValueError, match=message):
        of_up(**settings)
