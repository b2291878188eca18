"""When skipping neurons pays: windows of a text run dense or not, by what was measured before; nothing else matters."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_pack_mlp import QUANTS, F, Half, near, stream

from ralo import _core

WINDOW = 64


def decisions(counts: list[int], rho: float) -> list[bool]:
    """Which positions run dense, for tokens with so many active neurons: the rule in plain words."""
    out: list[bool] = []
    measured: dict[int, int] = {}
    for at, count in enumerate(counts):
        start = at // WINDOW * WINDOW
        first = next((i for i in range(start, at) if i in measured), at)
        before = [measured[i] for i in range(max(0, start - WINDOW), start) if i in measured]
        dense = bool(np.mean([*before, measured.get(first, count)]) > rho * F)
        if first == at or not dense:
            measured[at] = count
        out.append(dense)
    return out


def sparse_and_full(half: Half) -> tuple[np.ndarray, np.ndarray, float]:
    """A token with few active neurons, one with many, and a share in between."""
    tokens = [stream(1, seed) for seed in range(40)]
    tokens.sort(key=lambda x: len(half.active(x)))
    return tokens[0], tokens[-1], (len(half.active(tokens[0])) + len(half.active(tokens[-1]))) / 2 / F


@pytest.mark.parametrize("quant", QUANTS)
def test_too_dense_is_dense_bit_for_bit(level, quant):
    half = Half(quant, "silu", 1e-4, rho=0.5)
    state, x = _core.LayerState(), stream(70)
    dense = half.run(x[:1])[1]
    for t in range(70):
        got, read = half.run(x[t : t + 1], t, state)
        assert np.array_equal(got, half.run(x[t : t + 1])[0])
        assert read == (dense + half.bytes_of(0) if t % WINDOW == 0 else dense)
    counts = half.slot.counts()
    assert (counts["steps"], counts["dense"], counts["packed"], counts["neurons"]) == (70, 70, 0, 2 * F)
    assert counts["bytes_skipped"] == 0
    assert np.array_equal(half.run(x, 0, _core.LayerState())[0], half.run(x)[0])


def test_windows_switch_both_ways(level):
    few, many, rho = sparse_and_full(Half())
    half, state = Half(rho=rho), _core.LayerState()
    tokens = [few] * 64 + [many] * 64 + [few] * 192 + [many] * 3
    want = decisions([len(half.active(x)) for x in tokens], rho)
    assert want[:64] == [False] * 64 and True in want and not all(want[-60:])
    for t, x in enumerate(tokens):
        before = half.slot.counts()["dense"]
        got = half.run(x, t, state)[0]
        assert half.slot.counts()["dense"] - before == want[t], t
        near(got, half.run(x)[0])
    assert state.nbytes >= 4 * len(tokens)

    together = Half(rho=rho)
    other, past = _core.LayerState(), 0
    for n in (1, 100, 3, len(tokens) - 104):
        together.run(np.concatenate(tokens[past : past + n]), past, other)
        past += n
    a, b = half.slot.counts(), together.slot.counts()
    assert all(a[name] == b[name] for name in ("steps", "neurons", "active", "packed", "dense"))


@pytest.mark.parametrize("keep", [0, 1, 63, 64, 65, 100, 128, 129])
def test_state_survives_trim_and_clone(level, keep):
    few, many, rho = sparse_and_full(Half())
    half = Half(rho=rho)
    tokens, others = [few] * 10 + [many] * 130, [many] * 30 + [few] * 100
    state, plain = _core.LayerState(), _core.LayerState()
    for t, x in enumerate(tokens):
        if t == keep:
            copy = state.clone()
        half.run(x, t, state)
    for t, x in enumerate(tokens[:keep]):
        half.run(x, t, plain)
    state.trim(keep)
    for t, x in enumerate(others):
        results = [half.run(x, keep + t, s)[0] for s in (state, plain, copy)]
        assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


def test_what_ran_without_the_state_is_not_measured(level):
    few, many, rho = sparse_and_full(Half())
    half, state = Half(rho=rho), _core.LayerState()
    half.run(many, 100, state)
    half.run(few, 128, state)  # with the one before it: dense or not by their mean
    assert half.slot.counts()["neurons"] == 2 * F and half.slot.counts()["dense"] >= 1


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_nan_is_planted_where_neurons_are_skipped(level, tokens):
    half, x = Half("int8", "silu", 1e-4, rho=0.5), stream(tokens)
    half.slot.plant = True
    assert np.array_equal(half.run(x, 0, _core.LayerState())[0], half.run(x)[0])
    assert half.slot.plant and half.slot.nonfinite == 0
