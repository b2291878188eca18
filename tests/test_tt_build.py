"""How the factors of a place are made: the lowest rank that keeps the gap, or the reason why it keeps its weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernels.test_linear import Rows
from test_proc_build import correlated
from tiny_cores import off, random_cores

from ralo.remake.layer import Refusal
from ralo.remake.quantised import quantised
from ralo.tt import build as tt_build
from ralo.tt import speed
from ralo.tt.build import _lowest, build
from ralo.tt.dims import choose
from ralo.tt.lowrank import gap_of
from ralo.tt.matrix import FactoredMatrix
from ralo.tt.place import Place, Recipe
from ralo.tt.train import trained

BEST = Recipe("best", rank=64, lower=False, gap=0.3, maxvol_k=8, cores=2, rest=False, quant="f32")
SEED = replace(BEST, form="seed", rank=4, gap=0.02)  # the document's own figures


def place_of(w: np.ndarray) -> Place:
    x = correlated(len(w))
    return Place.of({"o": Rows(np.ascontiguousarray(w.T, np.float32))}, "o", x.T.astype(np.float64) @ x, 16)


def random(ic: int, oc: int, rank: int = 0) -> np.ndarray:
    rng = np.random.default_rng([ic, oc])
    return rng.standard_normal((ic, rank)) @ rng.standard_normal((rank, oc)) if rank else rng.standard_normal((ic, oc))


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is measured, last: so that the clock decides nothing here."""
    said = [1.23456]
    monkeypatch.setattr("ralo.tt.ranks.STEP", 0)  # matrices are small here
    monkeypatch.setattr(tt_build, "speedup", lambda made, dense: said[-1])
    return said


def made(w: np.ndarray, recipe: Recipe) -> FactoredMatrix | Refusal:
    dense, _ = quantised("int8", np.asarray(w, np.float32), {"o": w.shape[1]}, None)
    found = build(place_of(w), recipe, dense)
    assert isinstance(found, Refusal) or (found.replaced, found.speedup) == (dense.nbytes, 1.235)
    return found


# ---------------------------------------------------------------- the lowest rank


@pytest.mark.parametrize(
    ("start", "lower", "needed", "found"),
    [
        (64, False, 1, 64),
        (1, False, 1, 64),
        (0, False, 64, 64),
        (65, False, 1, 128),
        (65, False, 129, 192),
        (64, False, 200, 256),
        (64, False, 320, 320),
        (64, False, 321, 0),
        (256, False, 100, 256),
        (256, True, 100, 128),
        (256, True, 256, 256),
        (256, True, 300, 320),
        (256, True, 0, 64),
        (1000, True, 320, 320),
        (1000, True, 321, 0),
    ],
)
def test_the_lowest_rank(start, lower, needed, found):
    assert _lowest(lambda rank: 0.1 if rank >= needed else 0.11, start, 320, 0.1, lower) == found


def test_a_rank_is_raised_or_lowered_until_the_gap_is_just_kept():
    w = random(320, 320, 100)
    assert made(w, BEST).rank == 64
    found = made(w, replace(BEST, gap=0.01))
    assert found.rank == 128 and found.gap < 1e-5
    low = random(320, 320, 30)
    assert made(low, replace(BEST, rank=128)).rank == 128
    assert made(low, replace(BEST, rank=128, lower=True)).rank == 64


# ---------------------------------------------------------------- why not


def test_refusals_say_why(faster):
    full = random(320, 320)
    said = made(full, replace(BEST, gap=0.01))
    assert isinstance(said, Refusal)
    assert said.startswith("misses 0.") and said.endswith(" at rank 128, the most that is smaller, and may miss 0.01")
    assert made(random(100, 128), BEST) == "is too small to be factored"
    coarse = made(random(320, 320, 100), replace(BEST, gap=0.03, quant="int4"))  # in floats it would be kept
    assert coarse.startswith("misses 0.") and coarse.endswith(" of its outputs at rank 64, more than 0.03")
    rest = made(full, replace(BEST, rest=True, gap=0.001))
    assert rest.startswith("misses 0.0") and rest.endswith(" of its outputs at rank 64, more than 0.001")
    faster.append(0.987)
    assert made(random(320, 320, 30), BEST) == "keeps the gap at rank 64, but is 0.99 times as fast"
    faster.append(1.0)
    assert made(random(320, 320, 30), BEST) == "keeps the gap at rank 64, but is 1.00 times as fast"


def test_a_rest_is_kept_at_int4():
    found = made(random(320, 320), replace(BEST, rest=True, quant="int8"))
    assert found.rest and found.rank == 64 and [s.quant for s in found.steps] == ["int4"] * 2


# ---------------------------------------------------------------- trains


@pytest.mark.parametrize("form", ["seed", "svd"])
def test_trains_of_random_weights_are_refused(form):
    said = made(random(128, 192), replace(SEED, form=form))
    assert isinstance(said, Refusal) and said.endswith(", the most that takes fewer multiplications, and may miss 0.02")
    assert float(said.split()[1]) > 0.5
    far = made(random(128, 192), replace(SEED, form=form, rank=1000, maxvol_k=1000))
    assert far == "takes more multiplications at rank 1000 than dense"


@pytest.mark.parametrize("form", ["seed", "svd"])
@pytest.mark.parametrize("cores", [2, 3])
def test_trains_are_found_where_there_are_some(form, cores):
    w = random_cores(*choose(128, 192, cores), 4).full()
    found = made(w, replace(SEED, form=form, cores=cores))
    assert found.gap <= 1e-5 and found.rank <= 4 and len(found.steps) == cores
    assert off(found.unpack(), w) < 1e-5 and found.nbytes < w.size


@pytest.mark.parametrize("form", ["seed", "svd"])
def test_the_rank_of_a_train_is_raised_until_the_gap_is_kept(form):
    w = random_cores(*choose(256, 256, 2), 3).full()
    found = made(w, replace(SEED, form=form, rank=1))
    assert found.rank == 4 and found.gap <= 1e-5
    assert made(w, replace(SEED, form=form, rank=2, gap=1.0)).rank == 2
    lost = made(random_cores(*choose(256, 256, 2), 12).full(), replace(SEED, form=form, rank=3))
    assert " at rank 6, the most that takes fewer multiplications" in lost


@pytest.mark.parametrize("quant", ["bf16", "int8", "int4"])
def test_rounded_trains_say_what_they_miss(quant):
    for ins, outs in (((4, 24), (16, 12)), ((24, 4), (12, 16))):  # one is cheaper forwards, the other backwards
        cores = random_cores(ins, outs, 5).normalised()
        place = place_of(cores.full())
        matrix = trained(place, cores, quant)
        assert [s.quant for s in matrix.steps] == [quant] * 2 and matrix.train.backwards == (ins[0] == 4)
        assert matrix.gap == pytest.approx(gap_of(place.weights, matrix.unpack(), place.moments), rel=0.05)
        assert 1e-4 < matrix.gap < {"bf16": 0.01, "int8": 0.03, "int4": 0.4}[quant]


# ---------------------------------------------------------------- places, and the clock


def test_a_place_is_what_its_tensors_say():
    rng, sizes = np.random.default_rng(1), {"q": 128, "k": 64, "v": 64}
    found = {s: Rows(rng.standard_normal((n, 40)).astype(np.float32)) for s, n in sizes.items()}
    found["k_bias"] = Rows(np.arange(64, dtype=np.float32)[:, None])
    x = correlated(40)
    moments = x.T.astype(np.float64) @ x
    place = Place.of(found, "qkv", moments, 32)
    assert (place.product, place.parts, place.wanted.shape) == (192, sizes, (40, 192))
    assert np.array_equal(place.weights, np.concatenate([found[s].values.T for s in sizes], axis=1))
    assert place.bias[128:192].tolist() == list(range(64)) and not place.bias[:128].any()
    energy = np.square(x.astype(np.float64) @ place.weights).sum(0)
    met = np.empty(192)
    for head in range(4):  # queries, of two groups: each half of a pair meets both halves of its key
        for e in range(32):
            met[32 * head + e] = sum(energy[128 + 32 * (head // 2) + f] for f in (e % 16, e % 16 + 16))
    for head in range(2):
        for e in range(32):
            queries = [32 * h + f for h in (2 * head, 2 * head + 1) for f in (e % 16, e % 16 + 16)]
            met[128 + 32 * head + e] = energy[queries].sum()
    np.testing.assert_allclose(place.felt, np.sqrt(met), rtol=1e-4)
    mlp = Place.of({"gate": found["q"], "up": found["q"]}, "up", moments, 32)
    assert (mlp.product, mlp.felt, mlp.bias) == (256, None, None)


def test_speed_is_measured_with_copies_that_fill_no_memory(monkeypatch):
    """Factors may be a thousandth of the weights: as many copies of those would be a thousand times the cache."""
    copied, copy = [], speed._copy
    monkeypatch.setattr(speed, "OUT_OF_CACHE", 1 << 20)
    monkeypatch.setattr(speed, "ROUNDS", 25)
    monkeypatch.setattr(speed, "_known", {})
    monkeypatch.setattr(speed, "_copy", lambda m: copied.append(m.nbytes) or copy(m))
    w = np.asarray(random(512, 512, 4), np.float32)
    dense, _ = quantised("f32", w, {"o": 512}, None)
    factors = place_of(w).two_factors(place_of(w).weighed(), 4, "int4")
    found = speed.speedup(factors, dense)
    assert found > 1 and sum(copied) < 8 * (1 << 20)
    assert speed.speedup(place_of(w).two_factors(place_of(w).weighed(), 500, "f32"), dense) < 1.5
