"""Norms, rotary embedding, activations: every width around the lanes, rows that lie apart, odd values."""

from __future__ import annotations

import numpy as np
import pytest
from reference import rows as ref

from ralo import _core

WIDTHS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 640)
ACTS = ("silu", "relu", "relu2", "gelu", "gelu_tanh")
EPS = 2.0**-24  # half an ulp of 1.0: the relative error of one float32 operation
ROWS = 19  # not a multiple of the 8 rows of a task


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def apart(x: np.ndarray) -> np.ndarray:
    """The same rows as a slice of a wider array."""
    wide = np.full((len(x), x.shape[1] + 5), np.nan, np.float32)
    wide[:, 2:-3] = x
    return wide[:, 2:-3]


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("d", WIDTHS)
def test_norm_rms(level, d):
    x, w = normal(ROWS, d), normal(d, seed=1)
    x[3] = 0
    x[4] *= 1e-4  # here eps counts
    x[5] *= 1e15
    out = apart(np.zeros_like(x))
    _core.norm_rms(apart(x), w, 1e-6, out)
    want = ref.norm_rms(x, w, 1e-6)
    assert (np.abs(out - want) <= (d / 2 + 6) * EPS * np.abs(want)).all()  # the root halves the error of the sum


@pytest.mark.parametrize("d", WIDTHS)
def test_norm_layer(level, d):
    x, w, b = normal(ROWS, d), normal(d, seed=1), normal(d, seed=2)
    x[3], x[4] = 0, 7  # no variance
    x[5] += 100
    out = apart(np.zeros_like(x))
    _core.norm_layer(apart(x), w, b, 1e-5, out)
    # An error of the mean, d roundings of the mean magnitude, is divided by the deviation like everything else.
    wide = x.astype(np.float64)
    deviation = np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    mean_error = d * np.abs(wide).mean(1, keepdims=True)
    centred = np.abs(wide - wide.mean(1, keepdims=True))
    steps = (mean_error + np.abs(wide) + (d + 8) * centred) / deviation * np.abs(w) + 4 * np.abs(b)
    assert (np.abs(out - ref.norm_layer(x, w, b, 1e-5)) <= steps * EPS + 1e-30).all()


@pytest.mark.parametrize("e", WIDTHS)
def test_norm_heads(level, e):
    x, w = normal(ROWS, 3 * e), normal(e, seed=1)
    view = apart(x)
    _core.norm_heads(view, w, 1e-6)
    want = ref.norm_heads(x, w, 1e-6)
    assert (np.abs(view - want) <= (e / 2 + 6) * EPS * np.abs(want)).all()


def test_norms_in_place(level):
    x, w = normal(ROWS, 33), normal(33, seed=1)
    apart_from_x, inside = np.empty_like(x), x.copy()
    _core.norm_rms(x, w, 1e-6, apart_from_x)
    _core.norm_rms(inside, w, 1e-6, inside)
    assert np.array_equal(inside, apart_from_x)


def test_norms_pass_a_nan_on(level):
    x, one = normal(3, 20), np.ones(20, np.float32)
    x[1, 19] = np.nan
    for call in (lambda out: _core.norm_rms(x, one, 1e-6, out), lambda out: _core.norm_layer(x, one, one, 1e-6, out)):
        out = np.zeros_like(x)
        call(out)
        assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


# ---------------------------------------------------------------- rotary embedding


@pytest.mark.parametrize("half", WIDTHS[:-1])
@pytest.mark.parametrize("rest", [0, 1, 6])  # of the head's width, not turned
def test_rope(level, half, rest):
    x = normal(ROWS, 3 * (2 * half + rest))
    angles = normal(ROWS, half, seed=1) * 100
    cos, sin = np.cos(angles), np.sin(angles)
    view = apart(x)
    _core.rope(view, 3, cos, sin)
    np.testing.assert_array_equal(view, ref.rope(x, 3, cos, sin))


def test_rope_without_pairs(level):
    x = normal(2, 6)
    kept = x.copy()
    _core.rope(x, 2, np.empty((2, 0), np.float32), np.empty((2, 0), np.float32))
    assert np.array_equal(x, kept)


def test_rope_writes_nothing_beside_its_rows(level):
    wide = normal(4, 40)
    kept = wide.copy()
    _core.rope(wide[:, 3:37], 1, normal(4, 17), normal(4, 17))
    assert np.array_equal(wide[:, :3], kept[:, :3]) and np.array_equal(wide[:, 37:], kept[:, 37:])


# ---------------------------------------------------------------- activations


def act_bound(name: str, x: np.ndarray, want: np.ndarray) -> np.ndarray:
    """What float32 may differ by: the function's own conditioning, a few roundings, results too small for a float."""
    x = np.abs(x.astype(np.float64))
    if name == "gelu":
        return 4 * EPS * x  # erf is as exact as float32 is near 1, also where 1 + erf is small
    if name == "gelu_tanh":
        inner = 1.6 * x * (1 + 0.045 * x**2)  # four roundings of the exponent
        return (8 + 4 * np.minimum(inner, 90)) * EPS * np.abs(want) + 1e-33
    return (8 if name == "silu" else 1) * EPS * np.abs(want) + 1e-33


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("name", ACTS)
def test_act(level, name, n):
    gate, up = normal(ROWS, n) * 4, normal(ROWS, n, seed=1)
    want, out = ref.act(name, gate), np.zeros_like(gate)
    bound = act_bound(name, gate, want)
    _core.act(name, apart(gate), None, out)
    assert (np.abs(out - want) <= bound).all()
    _core.act(name, apart(gate), apart(up), out)
    assert (np.abs(out - want * up) <= (bound + EPS * np.abs(want)) * np.abs(up)).all()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_act_over_its_whole_range(level, name):
    x = np.linspace(-120, 120, 200_003, dtype=np.float32).reshape(1, -1)
    out, want = np.empty_like(x), ref.act(name, x)
    _core.act(name, x, None, out)
    assert (np.abs(out - want) <= act_bound(name, x, want)).all()


def test_exp_is_good_to_a_few_ulp(level):
    """Seen through silu, whose only other roundings are one sum and one quotient: 2 + 1/2 + 1/2 ulp, and some room."""
    x = np.linspace(-86.9, 87.9, 400_001, dtype=np.float32).reshape(1, -1)
    out = np.empty_like(x)
    _core.act("silu", x, None, out)
    ulp = np.spacing(np.abs(ref.act("silu", x)).astype(np.float32)).astype(np.float64)
    assert (np.abs(out - ref.act("silu", x)) / ulp).max() < 4


@pytest.mark.parametrize("name", ACTS)
def test_act_of_extremes(level, name):
    large = np.array([[1e3, 1e9, 1e18, -1e3, -1e9, -1e18, -1e38, -3e38]], np.float32)
    out = np.empty_like(large)
    _core.act(name, large, None, out)
    np.testing.assert_allclose(out[0, :3], large[0, :3] ** (2 if name == "relu2" else 1), rtol=1e-6)
    assert (np.abs(out[0, 3:]) < 1e-30).all()


@pytest.mark.parametrize("name", ACTS)
def test_act_passes_a_nan_on(level, name):
    for at in range(19):  # in every lane, and in what is left over
        x = np.ones((1, 19), np.float32)
        x[0, at] = np.nan
        out = np.zeros_like(x)
        _core.act(name, x, None, out)
        assert np.flatnonzero(np.isnan(out[0])).tolist() == [at]


# ---------------------------------------------------------------- threads, empty input, the yardstick


def everything(t: int) -> bytes:
    x, w = normal(t, 33), normal(33, seed=1)
    out = [np.zeros_like(x) for _ in range(3)]
    _core.norm_rms(x, w, 1e-6, out[0])
    _core.norm_layer(x, w, w, 1e-6, out[1])
    _core.act("gelu_tanh", x, x, out[2])
    _core.rope(out[0], 3, normal(t, 5), normal(t, 5))
    _core.norm_heads(out[1], w[:11].copy(), 1e-6)
    return b"".join(a.tobytes() for a in out)


def test_same_bits_again_and_at_any_number_of_threads(level, threads):
    for t in (1, 8, 9, 100):
        got = everything(t)
        assert got == everything(t)
        _core.set_threads(1)
        alone = everything(t)
        _core.set_threads(threads)
        assert got == alone


def test_no_rows(level):
    assert everything(0) == b""


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 9, 1000])
def test_stream_read(level, threads, n):
    words = np.random.default_rng(n).integers(0, 2**64, n, dtype=np.uint64)
    assert _core.stream_read(words) == int(words.sum(dtype=np.uint64))


# ---------------------------------------------------------------- refusals


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


WIDE = zeros(2, 8).astype(np.float64)
FIXED = zeros(2, 8)
FIXED.flags.writeable = False
REFUSED = [
    ("norm_rms", ValueError, zeros(2, 8), zeros(7), 1e-6, zeros(2, 8)),
    ("norm_rms", ValueError, zeros(2, 8), zeros(8), 1e-6, zeros(3, 8)),
    ("norm_rms", ValueError, zeros(2, 8), zeros(8), 1e-6, zeros(2, 9)),
    ("norm_rms", ValueError, zeros(2, 16)[:, ::2], zeros(8), 1e-6, zeros(2, 8)),
    ("norm_rms", ValueError, zeros(2, 8)[::-1], zeros(8), 1e-6, zeros(2, 8)),
    ("norm_rms", ValueError, np.broadcast_to(zeros(8), (2, 8)), zeros(8), 1e-6, zeros(2, 8)),
    ("norm_rms", ValueError, zeros(8, 2).T, zeros(8), 1e-6, zeros(2, 8)),
    ("norm_rms", TypeError, zeros(8), zeros(8), 1e-6, zeros(2, 8)),
    ("norm_rms", TypeError, WIDE, zeros(8), 1e-6, zeros(2, 8)),
    ("norm_rms", TypeError, zeros(2, 8), zeros(8), 1e-6, WIDE),
    ("norm_rms", TypeError, zeros(2, 8), zeros(8), 1e-6, FIXED),
    ("norm_rms", TypeError, zeros(2, 8), zeros(16)[::2], 1e-6, zeros(2, 8)),
    ("norm_layer", ValueError, zeros(2, 8), zeros(8), zeros(7), 1e-6, zeros(2, 8)),
    ("norm_layer", ValueError, zeros(2, 8), zeros(7), zeros(7), 1e-6, zeros(2, 8)),
    ("norm_layer", ValueError, zeros(3, 8), zeros(8), zeros(8), 1e-6, zeros(2, 8)),
    ("norm_layer", TypeError, zeros(2, 8), zeros(8), None, 1e-6, zeros(2, 8)),
    ("norm_layer", TypeError, WIDE, zeros(8), zeros(8), 1e-6, zeros(2, 8)),
    ("norm_heads", ValueError, zeros(2, 8), zeros(3), 1e-6),
    ("norm_heads", ValueError, zeros(2, 8), zeros(0), 1e-6),
    ("norm_heads", ValueError, zeros(2, 16)[:, ::2], zeros(4), 1e-6),
    ("norm_heads", TypeError, WIDE, zeros(4), 1e-6),
    ("norm_heads", TypeError, FIXED, zeros(4), 1e-6),
    ("rope", ValueError, zeros(2, 8), 3, zeros(2, 1), zeros(2, 1)),
    ("rope", ValueError, zeros(2, 8), 0, zeros(2, 1), zeros(2, 1)),
    ("rope", ValueError, zeros(2, 8), 2, zeros(2, 3), zeros(2, 3)),  # wider than the head
    ("rope", ValueError, zeros(2, 8), 2, zeros(2, 2), zeros(2, 1)),
    ("rope", ValueError, zeros(2, 8), 2, zeros(1, 2), zeros(1, 2)),
    ("rope", TypeError, WIDE, 2, zeros(2, 2), zeros(2, 2)),
    ("rope", TypeError, FIXED, 2, zeros(2, 2), zeros(2, 2)),
    ("rope", TypeError, zeros(2, 8), 2, zeros(2, 4)[:, ::2], zeros(2, 2)),
    ("rope", TypeError, zeros(2, 8), -2, zeros(2, 2), zeros(2, 2)),
    ("act", ValueError, "tanh", zeros(2, 8), None, zeros(2, 8)),
    ("act", ValueError, "relu", zeros(2, 8), None, zeros(2, 9)),
    ("act", ValueError, "relu", zeros(2, 8), zeros(2, 7), zeros(2, 8)),
    ("act", ValueError, "relu", zeros(2, 8), zeros(1, 8), zeros(2, 8)),
    ("act", ValueError, "relu", zeros(2, 8), zeros(2, 16)[:, ::2], zeros(2, 8)),
    ("act", TypeError, "relu", zeros(2, 8), None, zeros(2, 16)[:, :8]),
    ("act", TypeError, "relu", zeros(2, 8), None, WIDE),
    ("act", TypeError, "relu", zeros(2, 8), WIDE, zeros(2, 8)),
    ("act", TypeError, "relu", zeros(2, 8), None, FIXED),
    ("act", TypeError, None, zeros(2, 8), None, zeros(2, 8)),
    ("stream_read", TypeError, zeros(2)),
    ("stream_read", TypeError, np.zeros(8, np.uint64)[::2]),
]


@pytest.mark.parametrize(("name", "error", "args"), [(name, error, args) for name, error, *args in REFUSED])
def test_wrong_arguments_are_refused(name, error, args):
    with pytest.raises(error):
        getattr(_core, name)(*args)
