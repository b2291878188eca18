"""Gates guessed by counting bits: the reference's integers at every level and in every way, and what the MLP does."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_block import normal
from kernels.test_neurons import laid_out
from kernels.test_pack_mlp import QUANTS, D, F, Half, clear_of, near, stream
from reference import gates, neurons

from ralo import _core

WAYS = ("vpopcntdq", "popcnt", "lut", "kernighan")
SHAPES = [(1, 1), (63, 7), (64, 8), (65, 9), (200, 130), (513, 64)]  # (d, neurons)
INF = float("inf")


def counts(way: str, bits: np.ndarray, x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    planes = np.full((bits.shape[1], gates.PLANES), 7, np.uint64)
    out = np.full((len(bits), gates.NEURONS), 7, np.int32)
    return _core.gate_counts(way, bits, x, planes, out), planes, out.reshape(-1)


def has(way: str) -> bool:
    try:
        counts(way, np.zeros((1, 1, 2, 8), np.uint64), np.ones(1, np.float32))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_codes_equal_the_reference(threads, quant, shape):
    d, f = shape
    data, scales = laid_out(quant, d, f)
    bits, sizes = _core.gate_codes(quant, d, f, data, scales)
    sign, want = gates.signs(neurons.unpack(quant, data, scales)[:, :d])
    assert np.array_equal(bits, gates.pack(sign))
    np.testing.assert_allclose(sizes, want, rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_counts_equal_the_reference(any_level, way, shape):
    if not has(way):
        pytest.skip(f"{any_level} cannot count bits by {way}")
    d, f = shape
    sign, x = gates.signs(normal(f, d, seed=5))[0], normal(d, seed=6)
    step, planes, got = counts(way, gates.pack(sign), x)
    number = gates.numbers(x, step)
    assert np.array_equal(planes, gates.planes(number))
    assert np.array_equal(got[:f], sign @ number) and not got[f:].any()


def test_every_level_has_a_way(any_level):
    assert has("lut") and has("kernighan") and has("popcnt") >= (any_level != "base")


def test_the_step_suits_the_values(any_level):
    bits = np.zeros((1, 8, 2, 8), np.uint64)
    x = normal(500)

    def lost(x: np.ndarray) -> float:
        step = counts("lut", bits, x)[0]
        return float(((x - step * gates.numbers(x, step)) ** 2).mean() / (x**2).mean())

    assert lost(x) < 0.015
    outlier = x.copy()
    outlier[7] = 20
    assert lost(outlier) < 0.25  # clipped as a bell curve's values are it would lose 0.3
    assert counts("lut", bits, np.zeros(500, np.float32))[0] == 0
    for bad in (np.nan, np.inf):
        x[3] = bad
        assert not np.isfinite(counts("lut", bits, x)[0])


# ---------------------------------------------------------------- in an MLP


def candidates(half: Half, x: np.ndarray, slack: float, offset: np.ndarray | float = 0.0) -> np.ndarray:
    """As counted by the kernel, whose integers are tested above."""
    inside = np.ascontiguousarray(half.normed(x).astype(np.float32))
    step, _, count = counts("lut", half.codes[0], inside)
    bias = 0 if half.up.bias is None else half.up.bias[half.up.slices["gate"]]
    return np.flatnonzero(step * half.codes[1] * count[:F] + bias + offset + slack > 0)


@pytest.mark.parametrize("quant", QUANTS)
def test_with_room_for_every_gate_nothing_changes(any_level, quant):
    plain, half, x = Half(quant), Half(quant, slack=INF), stream(5)
    a, b = _core.LayerState(), _core.LayerState()
    for t in range(5):
        assert np.array_equal(plain.run(x[t : t + 1], t, a)[0], half.run(x[t : t + 1], t, b)[0])
    found = half.slot.counts()
    assert found["candidates"] == 5 * F and found["missed"] == 0 < found["checked"]
    assert found["active"] == plain.slot.counts()["active"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("quant", QUANTS)
def test_candidates_alone_are_computed(any_level, quant, way):
    if not has(way):
        pytest.skip(f"{any_level} cannot count bits by {way}")
    offset = normal(F, seed=4) * 0.1
    half, x, state = Half(quant, slack=0.3, offset=offset, popcount=way), stream(2), _core.LayerState()
    skipped, dense = 0, half.run(x[:1])[1]
    for t in range(2):
        chosen = candidates(half, x[t : t + 1], 0.3, offset)
        active = np.intersect1d(half.active(x[t : t + 1]), chosen)
        got, read = half.run(x[t : t + 1], t, state)
        near(got, half.want(x[t : t + 1], active))
        gates_read = F if t == 0 else len(chosen)  # the first token of a window checks the guess
        codes = sum(a.nbytes for a in half.codes) + offset.nbytes
        row = neurons.neuron_bytes(quant, D)
        assert read == codes + (gates_read - F) * row + half.bytes_of(len(active))
        skipped += max(0, dense - read)  # a check may read more than dense does, where rows are mostly padding
    found = half.slot.counts()
    open_ = half.active(x[:1])
    assert found["checked"] == len(open_)
    assert found["missed"] == len(np.setdiff1d(open_, candidates(half, x[:1], 0.3, offset))) > 0
    assert found["candidates"] == F + len(chosen)
    assert found["bytes_skipped"] == skipped > 0


@pytest.mark.parametrize(
    "setting", [("relu", 0.0, {"slack": 0.2}), ("silu", 0.1, {"slack": 0.0, "keep": 0.3})], ids=str
)
@pytest.mark.parametrize("quant", QUANTS)
def test_many_tokens_are_as_one_by_one(any_level, quant, setting):
    name, eps, guess = setting
    x, state = stream(70), _core.LayerState()
    eps = clear_of(Half(quant, name), x, eps)
    half, alone = (Half(quant, name, eps, **guess) for _ in range(2))
    together, _ = half.run(x, 2, _core.LayerState())
    for t in range(70):
        near(alone.run(x[t : t + 1], 2 + t, state)[0], together[t])
    a, b = half.slot.counts(), alone.slot.counts()
    assert all(a[name] == b[name] for name in ("steps", "neurons", "packed", "dense", "candidates"))
    # What lies at a bound may round to either side of it.
    assert all(abs(a[name] - b[name]) <= 2 for name in ("active", "checked", "missed"))


def test_keep_is_a_share_of_every_task(any_level):
    half, x, state = Half("int8", "silu", 0.0, slack=0.0, keep=0.25), stream(2), _core.LayerState()
    for t in range(2):
        half.run(x[t : t + 1], t, state)
    assert half.slot.counts()["candidates"] == F + 64 + 64 + 22  # a quarter of 256, 256 and 88
    assert 0 < half.slot.counts()["missed"] < half.slot.counts()["checked"]


def test_without_candidates_only_the_bias_is_added(any_level):
    half, x, state = Half("int8", slack=-INF), stream(2), _core.LayerState()
    for t in range(2):
        near(half.run(x[t : t + 1], t, state)[0], half.want(x[t : t + 1], np.empty(0, np.int64)))
    assert half.slot.counts()["missed"] == half.slot.counts()["checked"] > 0


def test_what_is_not_finite_is_dense(any_level):
    half, x, state = Half("int8", slack=0.5), stream(3), _core.LayerState()
    half.run(x[:1], 0, state)
    half.slot.plant = True
    assert np.array_equal(half.run(x[1:2], 1, state)[0], half.run(x[1:2])[0])
    assert half.slot.nonfinite == 1 and not half.slot.plant
    x[2, 5] = np.nan
    assert np.isnan(half.run(x[2:], 2, state)[0]).any() and half.slot.nonfinite == 2


def test_guesses_that_do_not_fit_are_refused():
    half = Half("int8", slack=0.0)
    bits, sizes = half.codes
    rows, none = half.rows("up"), (None, None)
    guess = _core.GateGuess(D, F, bits, sizes, None, 0.0)
    small = _core.GateGuess(D, F - 8, bits[1:], sizes[8:], None, 0.0)
    cases = [
        ("bits must be", lambda: _core.GateGuess(D, F, bits[1:], sizes, None, 0.0)),
        ("scales of the codes", lambda: _core.GateGuess(D, F, bits, sizes[1:], None, 0.0)),
        ("offset must be", lambda: _core.GateGuess(D, F, bits, sizes, sizes[1:], 0.0)),
        ("keep a share", lambda: _core.GateGuess(D, F, bits, sizes, None, 0.0, 1.5)),
        ("slack must be", lambda: _core.GateGuess(D, F, bits, sizes, None, float("nan"))),
        ("bits are counted by", lambda: _core.GateGuess(D, F, bits, sizes, None, 0.0, 0.0, "fingers")),
        ("needs rows of the gate", lambda: _core.PackMlp("int8", D, F, *rows, *none, 0.0, 1.0, guess)),
        ("another shape", lambda: _core.PackMlp("int8", D, F, *rows, *rows, 0.0, 1.0, small)),
    ]
    for message, case in cases:
        with pytest.raises(ValueError, match=message):
            case()
