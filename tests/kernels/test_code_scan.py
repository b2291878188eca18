"""Scans over packed keys: what the bound finds, and that every way to count bits agrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from kernels.test_attention import WIDTHS
from kernels.test_block import normal
from kernels.test_codes import FORMS, SCALE, by_key, code, packed, queries, unpacked
from pairwise import pairwise
from reference import codes as ref

from ralo import _core

GROUP = ref.BLOCK // ref.STEP
WAYS = ("vpopcntdq", "lut", "popcnt", "kernighan")


@dataclass
class Scan:
    """The arguments of a scan over some blocks, in the kernel's layout."""

    form: ref.Form
    bits: np.ndarray
    scales: np.ndarray
    planes: np.ndarray
    factor: np.ndarray
    offset: np.ndarray
    blocks: np.ndarray
    norm: np.ndarray

    @classmethod
    def of(cls, form: ref.Form, e: int, g: int, loud: float = 4) -> Scan:
        q = queries(g, e) * np.float32(loud)
        bits, scales, means, _ = code("f16", e, form)
        blocks = q @ means.view(np.float16).astype(np.float32).T  # of forms that are not centred: zeros
        scan = cls(form, bits, scales, *packed(form, q, loud * SCALE), blocks, np.zeros(g, np.float32))
        best = scan.guesses().max(1)
        scan.norm = (best + np.abs(normal(g, seed=6))).astype(np.float32)
        return scan

    def run(self, way: str, bound: float, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Positions and importances of what was found."""
        room = len(self.bits) * ref.BLOCK + GROUP
        at, importance = np.full(room, 2**32 - 1, np.uint32), np.full(room, np.nan, np.float32)
        over = np.ascontiguousarray(self.blocks - self.norm[:, None])
        query = (self.planes, self.factor, self.offset, over)
        n = _core.code_scan(way, self.form.code, self.bits, self.scales, *query, bound, first, at, importance)
        return at[:n], importance[:n]

    def guesses(self) -> np.ndarray:
        codes = ref.Encoded(unpacked(by_key(self.bits)), by_key(self.scales), None, None)
        parts = zip(self.planes, self.factor, self.offset, strict=True)
        made = [ref.Query(unpacked(p), f, o) for p, f, o in parts]
        return ref.guesses(self.form, made, codes, self.blocks.astype(np.float64))


def bounds(scan: Scan) -> Iterator[float]:
    """That find all keys, many, few, and none."""
    of_keys = ref.importance(scan.guesses(), scan.norm.astype(np.float64))
    yield -np.inf
    yield from np.quantile(of_keys, (0.3, 0.95))
    yield of_keys.max() + 1


@pytest.mark.parametrize(("form", "e", "g"), pairwise(FORMS, (*WIDTHS, 320), (1, 2, 3, 5, 16)))
def test_scans(any_level, form, e, g):
    scan = Scan.of(form, e, g)
    want, norm = scan.guesses(), scan.norm.astype(np.float64)
    size = np.abs(want).max() + np.abs(scan.blocks).max() + 1
    for bound, first in zip(bounds(scan), (0, 4, 70, 0), strict=True):
        at, importance = scan.run(_core.popcounts()[0], bound, first)
        must, may = (ref.scan(want, norm, bound + d, first) for d in (1e-3, -1e-3))
        assert set(must) <= set(at) <= set(may) and len(set(at)) == len(at)
        np.testing.assert_allclose(importance, ref.importance(want, norm)[at], atol=2e-6 * size)


@pytest.mark.parametrize("first", [0, 1, 4, 63, 64, 65, 100, 191, 192])
def test_scans_from_a_position_on(any_level, first):
    at, _ = Scan.of(ref.Form("signs"), 64, 2, loud=1).run("lut", -np.inf, first)
    assert sorted(at) == list(range(first, 192))


@pytest.mark.parametrize(("form", "e", "g"), pairwise(FORMS, (16, 64, 80, 128, 320), (1, 3, 16)))
def test_every_way_to_count_gives_the_same_bits(any_level, form, e, g):
    scan = Scan.of(form, e, g)
    bound = list(bounds(scan))[1]
    first, *others = (scan.run(way, bound, 70) for way in _core.popcounts())
    assert len(first[0]) > 10 and len(others) >= 1
    for other in others:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, other, strict=True))


def test_words_of_ones_are_counted_fully(any_level):
    """All 64 bits of every word, and none: the ends of every way to count."""
    scan = Scan.of(ref.Form("signs"), 128, 1)
    scan.bits, scan.planes = np.zeros_like(scan.bits), np.full_like(scan.planes, 2**64 - 1)
    scan.bits[:, 1] = 2**64 - 1
    scan.scales[:] = ref.to_bf16(np.float32([1]))
    scan.factor[:], scan.offset[:], scan.blocks[:], scan.norm[:] = 1, 0, 0, 0
    for way in _core.popcounts():
        at, importance = scan.run(way, -np.inf)
        assert np.array_equal(importance, np.where(at % ref.STEP == 1, 0, 128))


def test_what_is_not_a_number_is_not_found(any_level):
    scan = Scan.of(ref.Form("signs"), 64, 2)
    scan.blocks[:, 1] = np.nan
    for way in _core.popcounts():
        at, _ = scan.run(way, -1e30)
        assert sorted(at) == [*range(64), *range(128, 192)]


def test_ways_to_count_here(any_level):
    """Fastest first; a level without an instruction does not offer it."""
    ways = _core.popcounts()
    assert {"lut", "kernighan"} <= set(ways) <= set(WAYS) and ways[-1] == "kernighan"
    assert ("vpopcntdq" in ways) == (any_level in ("avx512vbmi", "amx"))
    for way in set(WAYS) - set(ways):
        with pytest.raises(ValueError, match="this CPU, or the ISA level in use, cannot count bits that way"):
            _core.PackKeys(popcount=way)
        with pytest.raises(ValueError, match="cannot count bits that way"):
            Scan.of(ref.Form("signs"), 16, 1).run(way, 0)
    with pytest.raises(ValueError, match="bits are counted by vpopcntdq, popcnt, lut or kernighan"):
        _core.PackKeys(popcount="abacus")


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {"bits": s.bits[:, :3].copy()},
        lambda s: {"bits": s.bits[:2].copy()},
        lambda s: {"scales": s.scales[:, :3].copy()},
        lambda s: {"scales": s.scales[:2].copy()},
        lambda s: {"planes": s.planes[:1].copy()},
        lambda s: {"planes": np.zeros((2, 1, 2), np.uint64)},
        lambda s: {"planes": np.zeros((2, 5, 1), np.uint64)},
        lambda s: {"factor": s.factor[:1]},
        lambda s: {"offset": s.offset[:1]},
        lambda s: {"blocks": s.blocks[:, :2].copy()},
    ],
)
def test_shapes_that_do_not_fit_are_refused(change):
    scan = Scan.of(ref.Form("signs"), 64, 2)
    for name, value in change(scan).items():
        setattr(scan, name, value)
    with pytest.raises(ValueError):
        scan.run("lut", 0)
