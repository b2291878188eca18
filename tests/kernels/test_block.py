"""The halves of a layer in one call, against the references of what they are made of."""

from __future__ import annotations

import numpy as np
import pytest
from reference import attention as attention_ref
from reference import rows as rows_ref
from reference.rounded import LEVELS

from ralo import _core
from ralo.matrix import Matrix, padded

D, F, HEADS, KV_HEADS, E = 40, 72, 4, 2, 12
EPS = 1e-5


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


class Rows:
    def __init__(self, values: np.ndarray) -> None:
        self.name, self.shape, self.dtype, self.values = "w", values.shape, "f32", values

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop]

    def stored(self) -> None:
        return None

    def release(self) -> None: ...


def packed(weights: dict[str, np.ndarray], quant: str = "f32") -> Matrix:
    """Dense (outputs, ic) parts side by side, with a bias of their first column."""
    ic = next(iter(weights.values())).shape[1]
    matrix = Matrix.empty(quant, ic, {name: len(w) for name, w in weights.items()}, bias=True)
    for name, w in weights.items():
        assert matrix.pack(name, Rows(w))
        matrix.bias[matrix.slices[name]] = w[:, 0]
    return matrix


def linear(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x @ w.astype(np.float64).T + w[:, 0]


def stream(tokens: int) -> np.ndarray:
    """A residual stream (T, D padded); what lies in the padding is not read."""
    x = np.full((tokens, padded(D)), 7, np.float32)
    x[:, :D] = normal(tokens, D, seed=tokens)
    return x


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("head_norm", [False, True])
def test_attention(level, threads, tokens, layer_norm, head_norm):
    shapes = {"q": (HEADS * E, D), "k": (KV_HEADS * E, D), "v": (KV_HEADS * E, D)}
    w = {name: normal(*shape, seed=1) * 0.2 for name, shape in shapes.items()}
    w_o, weight, bias = normal(D, HEADS * E, seed=2) * 0.2, normal(D, seed=3), normal(D, seed=4)
    head = normal(E, seed=5) if head_norm else None
    cos, sin = np.cos(normal(tokens, E // 2)), np.sin(normal(tokens, E // 2))
    qkv, o = packed(w), packed({"o": w_o})
    norm = _core.Norm(weight, bias if layer_norm else None, EPS)
    half = _core.Attention(norm, qkv.core, o.core, HEADS, KV_HEADS, E, head, head, 0)
    cache = _core.LayerCache("f32", *(np.zeros((KV_HEADS, 16, 16 * 4), np.uint8) for _ in "kv"), None, None)
    x = stream(tokens)
    before = x[:, :D].astype(np.float64)
    weights_read, _ = half.run(x, cache, 0, cos, sin, True)

    inner = rows_ref.norm_layer(before, weight, bias, EPS) if layer_norm else rows_ref.norm_rms(before, weight, EPS)
    parts = {name: linear(w[name], inner).reshape(tokens, -1, E) for name in w}
    for name in ("q", "k"):
        if head_norm:
            parts[name] = rows_ref.norm_rms(parts[name], head, EPS)
        flat = parts[name].reshape(tokens, -1)
        parts[name] = rows_ref.rope(flat, flat.shape[1] // E, cos, sin).reshape(tokens, -1, E)
    out, _ = attention_ref.attend(parts["q"], parts["k"], parts["v"], 0, 0, E**-0.5)
    np.testing.assert_allclose(x[:, :D], before + linear(w_o, out.reshape(tokens, -1)), atol=2e-5)
    assert weights_read == qkv.data.nbytes + o.data.nbytes


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("gated", [False, True])
def test_mlp(level, threads, tokens, gated):
    names = ("gate", "up") if gated else ("up",)
    w = {name: normal(F, D, seed=i) * 0.2 for i, name in enumerate(names)}
    w_down, weight = normal(D, F, seed=8) * 0.2, normal(D, seed=9)
    up, down = packed(w), packed({"down": w_down})
    half = _core.Mlp(_core.Norm(weight, None, EPS), up.core, down.core, F, gated, "silu")
    x = stream(tokens)
    before = x[:, :D].astype(np.float64)
    read = half.run(x)
    inner = rows_ref.norm_rms(before, weight, EPS)
    hidden = rows_ref.act("silu", linear(w[names[0]], inner)) * (linear(w["up"], inner) if gated else 1)
    np.testing.assert_allclose(x[:, :D], before + linear(w_down, hidden), atol=2e-5)
    assert read == up.data.nbytes + down.data.nbytes


def applied(matrix: Matrix, x: np.ndarray, exact: bool, y: np.ndarray | None = None) -> np.ndarray:
    out = np.zeros((len(x), matrix.oc), np.float32) if y is None else y.copy()
    matrix.core.apply(np.ascontiguousarray(x), out, y is not None, exact)
    return out


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_halves_round_what_their_parts_round(level, quant):
    """Bit for bit the parts one by one: every product, and attention, is told whether to be exact."""
    tokens, norm, found = 9, _core.Norm(normal(D, seed=3), None, EPS), []
    sizes = {"q": HEADS * E, "k": KV_HEADS * E, "v": KV_HEADS * E}
    qkv = packed({name: normal(n, D, seed=1) * 0.2 for name, n in sizes.items()}, quant)
    o, down = packed({"o": normal(D, HEADS * E, seed=2)}, quant), packed({"down": normal(D, F, seed=8)}, quant)
    up = packed({"gate": normal(F, D, seed=6), "up": normal(F, D, seed=7)}, quant)
    attention = _core.Attention(norm, qkv.core, o.core, HEADS, KV_HEADS, E, None, None, 0)
    mlp = _core.Mlp(norm, up.core, down.core, F, True, "silu")
    for exact in (True, False):
        x = stream(tokens)
        inner, y = np.empty((tokens, D), np.float32), np.empty((tokens, HEADS * E), np.float32)
        norm.run(x[:, :D], inner)
        rows = applied(qkv, inner, exact)
        own = _core.LayerCache("f16", *(np.zeros((KV_HEADS, 16, 16 * 2), np.uint8) for _ in "kv"), None, None)
        own.store(rows[:, qkv.slices["k"]], rows[:, qkv.slices["v"]], 0)
        own.attend(rows[:, qkv.slices["q"]], HEADS, 0, 0, E**-0.5, y, exact)
        want = applied(o, y, exact, x)
        attention.run(x, own, 0, None, None, exact)
        assert np.array_equal(x, want)

        norm.run(x[:, :D], inner)
        rows = applied(up, inner, exact)
        hidden = np.empty((tokens, F), np.float32)
        _core.act("silu", rows[:, up.slices["gate"]], rows[:, up.slices["up"]], hidden)
        want = applied(down, hidden, exact, x)
        mlp.run(x, exact=exact)
        assert np.array_equal(x, want)
        found.append(x)
    assert np.array_equal(*found) == (level not in LEVELS)


def test_parts_that_do_not_fit_are_refused():
    norm = _core.Norm(normal(D), None, EPS)
    sizes = {"q": HEADS * E, "k": KV_HEADS * E, "v": KV_HEADS * E}
    qkv, o = Matrix.empty("f32", D, sizes, False), Matrix.empty("f32", HEADS * E, {"o": D}, False)
    up, down = Matrix.empty("f32", D, {"gate": F, "up": F}, False), Matrix.empty("f32", F, {"down": D}, False)
    cases = [
        lambda: _core.Norm(normal(D), normal(D + 1), EPS),
        lambda: _core.Attention(norm, qkv.core, o.core, HEADS, 3, E, None, None, 0),
        lambda: _core.Attention(norm, qkv.core, o.core, HEADS, KV_HEADS, E + 1, None, None, 0),
        lambda: _core.Attention(norm, o.core, qkv.core, HEADS, KV_HEADS, E, None, None, 0),
        lambda: _core.Attention(norm, qkv.core, o.core, HEADS, KV_HEADS, E, normal(E + 1), None, 0),
        lambda: _core.Mlp(norm, up.core, down.core, F + 64, True, "silu"),
        lambda: _core.Mlp(norm, up.core, down.core, F, False, "silu"),
        lambda: _core.Mlp(norm, up.core, down.core, F, True, "tanh"),
        lambda: _core.Mlp(norm, up.core, down.core, F, True, "silu").run(np.zeros((1, D), np.float32)),
    ]
    for i, case in enumerate(cases):
        with pytest.raises(ValueError):
            case()
            pytest.fail(f"case {i} was accepted")


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_prompts_neurons_group_by_group(level, threads, quant, gated):
    """Bit for bit one map after the other, where neurons are whole groups of 128 and where they are not."""
    d, norm = 300, _core.Norm(normal(300, seed=3), None, EPS)
    for f, tokens in ((128, 2), (200, 49), (330, 130), (512, 97)):
        up = packed({name: normal(f, d, seed=6) for name in (("gate", "up") if gated else ("up",))}, quant)
        down = packed({"down": normal(d, f, seed=8)}, quant)
        x = normal(tokens, padded(d), seed=tokens)
        inner, hidden = np.empty((tokens, d), np.float32), np.empty((tokens, f), np.float32)
        norm.run(x[:, :d], inner)
        rows = applied(up, inner, False)
        value = rows[:, up.slices["up"]]
        _core.act("silu", rows[:, up.slices["gate"]] if gated else value, value if gated else None, hidden)
        want = applied(down, hidden, False, x)
        _core.Mlp(norm, up.core, down.core, f, gated, "silu").run(x, exact=False)
        assert np.array_equal(x, want), (f, tokens)
