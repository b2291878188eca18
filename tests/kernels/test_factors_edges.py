"""Products that cannot be, each refused with its reason; and what is not finite between two steps: it is not lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.test_factors import FEW, QUANTS, step

from ralo import _core
from ralo.matrix import Matrix
from ralo.tt.matrix import RANK, FactoredMatrix, Train

FIRST = step("f32", 8, ((RANK, 5), ("v", 64)), 0)  # (8, 64 + 64), of which the last 64 are kept
SECOND = step("f32", 5, (("q", 64),), 1)
NESTED = FactoredMatrix(8, {"q": 64, "v": 64}, Train.two(8, 64, 5), [FIRST, SECOND], None)
BIASED = Matrix("f32", 5, {"q": 64}, SECOND.data, None, np.zeros(64, np.float32))
WIDE = step("f32", 10, (("q", 64),), 1)


def built(**change: Any) -> _core.FactoredMatrix:
    values = {"ic": 8, "oc": 128, "steps": (FIRST, SECOND), "rows": [1, 1], "orders": [None, None], "to": None}
    values |= {"outputs": 64, "kept": 64, "bias": None} | change
    values["steps"] = tuple(s.core if isinstance(s, Matrix) else s for s in values["steps"])
    return _core.FactoredMatrix(**values)


def order(*at: int, n: int = 0) -> np.ndarray:
    return np.array(at or range(n), np.uint32)


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("matrix too large, or oc not padded", {"oc": 0}),
        ("matrix too large, or oc not padded", {"oc": 127}),
        ("matrix too large, or oc not padded", {"oc": 1 << 28}),
        ("matrix too large, or oc not padded", {"ic": 0}),
        ("matrix too large, or oc not padded", {"ic": 1 << 24}),
        ("steps, rows and from differ", {"steps": (), "rows": [], "orders": []}),
        ("steps, rows and from differ", {"steps": (FIRST,)}),
        ("steps, rows and from differ", {"rows": [1]}),
        ("steps, rows and from differ", {"orders": [None]}),
        ("a step is a matrix", {"steps": (FIRST, "second")}),
        ("a step is a plain matrix and has rows", {"steps": (NESTED, SECOND)}),
        ("a step is a plain matrix and has rows", {"rows": [0, 1]}),
        ("a step is a plain matrix and has rows", {"rows": [1, 1 << 24]}),
        ("a step has no bias", {"steps": (FIRST, BIASED)}),
        ("a step takes what there is", {"ic": 7}),
        ("a step takes what there is", {"rows": [2, 1], "kept": 0, "outputs": 64, "oc": 64}),
        ("a step takes what there is", {"rows": [1, 13], "outputs": 832, "oc": 896}),  # what is kept is not for it
        ("a step takes what there is", {"orders": [order(n=7), None]}),
        ("a step takes what there is", {"orders": [order(n=9), None]}),
        ("a step takes what there is", {"orders": [order(0, 1, 2, 3, 4, 5, 6, 8), None]}),
        ("a step takes what there is", {"orders": [None, order(0, 1, 2, 3, 128)]}),
        ("outputs do not fit", {"outputs": 0}),
        ("outputs do not fit", {"outputs": 192, "to": order(*[0] * 192)}),
        ("outputs do not fit", {"outputs": 60}),
        ("outputs do not fit", {"to": order(n=63)}),
        ("outputs lie in what the last step gives", {"to": order(*range(63), 64)}),
        ("every output comes from the product or is kept", {"kept": 63}),
        ("every output comes from the product or is kept", {"oc": 64, "kept": 65, "orders": [None, order(n=5)]}),
        ("the first step keeps outputs", {"steps": (FIRST,), "rows": [1], "orders": [None], "outputs": 128}),
        ("the first step keeps outputs", {"ic": 16, "rows": [2, 1]}),
        ("the first step keeps outputs", {"kept": 128, "orders": [None, order(n=5)]}),
        ("bias must be", {"bias": np.zeros(64, np.float32)}),
    ],
)
def test_wrong_products_are_refused(line, change):
    built()  # as it should be
    with pytest.raises(ValueError, match=f"^{line}"):
        built(**change)


def test_wrong_types_are_refused():
    for change in ({"steps": FIRST}, {"rows": [-1, 1]}, {"to": np.arange(64)}, {"orders": [order(n=8), "x"]}):
        with pytest.raises(TypeError):
            built(**change)


def test_what_is_allowed_at_the_edge():
    built(rows=[1, 12], outputs=768, oc=832)  # all the ranks with their padding, up to what is kept
    built(steps=(FIRST,), rows=[1], orders=[None], outputs=128, kept=0)
    built(kept=127, oc=128, orders=[None, order(n=5)])  # over the product's last outputs


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="x must be"):
        built().apply(np.zeros((1, 9), np.float32), np.zeros((1, 128), np.float32))


def test_no_tokens():
    assert built().apply(np.empty((0, 8), np.float32), np.empty((0, 128), np.float32)) == 0


def test_steps_live_as_long_as_the_product():
    first, second = (Matrix("f32", s.ic, s.parts, s.data.copy(), None, None) for s in (FIRST, SECOND))
    w, x = built(steps=(first, second)), np.ones((1, 8), np.float32)
    want, got = np.empty((2, 1, 128), np.float32)
    built().apply(x, want)
    del first, second
    w.apply(x, got)
    assert np.array_equal(got, want)


# ---------------------------------------------------------------- not finite


def silent(quant: str, first: Matrix) -> _core.FactoredMatrix:
    """Whose second factor is all zeros: of what comes between, nothing reaches the outputs."""
    second = Matrix.empty(quant, 40, {"o": 128}, bias=False)
    return FactoredMatrix(96, {"o": 128}, Train.two(96, 128, 40), [first, second], None).core


def results(w: _core.FactoredMatrix, x: np.ndarray, rounded: bool = False) -> list[np.ndarray]:
    out = []
    for tokens, add in ((1, False), (1, True), (FEW, True), (20, False)):
        y = np.zeros((tokens, 128), np.float32)
        w.apply(x[-tokens:].copy(), y, add, not rounded)
        out.append(y)
    return out


@pytest.mark.parametrize("quant", QUANTS)
def test_an_input_that_is_not_finite_is_not_hidden_by_zeros(level, quant):
    w, x = silent(quant, step(quant, 96, ((RANK, 40),), 0)), np.ones((20, 96), np.float32)
    assert all((y == 0).all() for y in results(w, x))
    for value in (np.nan, np.inf, -np.inf):
        x[-1, 50] = value
        assert not any(np.isfinite(y).all() for y in results(w, x) + results(w, x, rounded=True))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_not_hidden_by_zeros(level, quant, value):
    plain = step(quant, 96, ((RANK, 40),), 0)
    data, scales = plain.data.copy(), None if plain.scales is None else plain.scales.copy()
    if scales is not None:
        scales[50, 0] = {"nan": 0x7FC0, "inf": 0x7F80}[str(value)]
    elif quant == "bf16":
        data.view(np.uint16)[50, 7] = {"nan": 0x7FC0, "inf": 0x7F80}[str(value)]
    else:
        data.view(np.float32)[50, 7] = value
    first = Matrix(quant, 96, plain.parts, data, scales, None)
    assert not any(np.isfinite(y).all() for y in results(silent(quant, first), np.ones((20, 96), np.float32)))


def test_a_sum_that_grows_too_large_between_steps_is_not_hidden(level):
    first = Matrix.empty("f32", 96, {RANK: 40}, bias=False)
    first.data.view(np.float32)[:] = 3e38
    assert not any(np.isfinite(y).all() for y in results(silent("int8", first), np.ones((20, 96), np.float32)))
