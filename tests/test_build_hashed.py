"""Building the document's form: the blocks that weigh most, deltas to the hash, soft and hard shedding."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_linear import Rows
from reference import hashed as ref

from ralo import RaloError, _core
from ralo.proc import build_hashed as builder
from ralo.proc.build_hashed import build_hashed
from ralo.proc.hashed import HashedMatrix

PARTS = {"q": 200, "k": 1, "v": 64}
REAL = np.concatenate([np.arange(-(-n // 64) * 64) < n for n in PARTS.values()])
ALL = 10**9  # a watermark that nothing reaches


def checkpoint(ic: int = 33, bias: bool = False) -> dict[str, Rows]:
    rng = np.random.default_rng(6)
    found = {s: Rows(0.05 * rng.standard_normal((n, ic)).astype(np.float32)) for s, n in PARTS.items()}
    return found | ({"k_bias": Rows(np.full(1, 3, np.float32))} if bias else {})


def dense(found: dict[str, Rows]) -> np.ndarray:
    """(ic, oc), padding included."""
    w = np.zeros((found["q"].shape[1], len(REAL)), np.float32)
    w[:, REAL] = np.concatenate([found[s].values for s in PARTS]).T
    return w


def one(rows: np.ndarray, **settings: float) -> tuple[HashedMatrix, int]:
    """Of weights (ic, outputs), one site."""
    wanted = {"fanout": 2, "block": 8, "base_scale": 0.05, "eps": 0.0, "watermark": ALL} | settings
    return build_hashed({"o": Rows(np.ascontiguousarray(rows.T, np.float32))}, "o", **wanted)


@pytest.mark.parametrize("base_scale", [0.0, 0.05])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.05])
@pytest.mark.parametrize("watermark", [0, 1, 20, ALL])
@pytest.mark.parametrize(("block", "fanout"), [(8, 1), (8, 11), (16, 5), (32, 3), (32, 64)])
def test_built_as_the_reference_says(block, fanout, watermark, eps, base_scale):
    found = checkpoint()
    got, trims = build_hashed(found, "qkv", fanout, block, base_scale, eps, watermark)
    want, trimmed = ref.build(dense(found), REAL, fanout, block, base_scale, eps, watermark)
    for name in ("blocks", "bits", "starts", "values"):
        a, b = got.arrays()[name], getattr(want, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), name
    assert trims == trimmed and got.parts == PARTS
    assert np.array_equal(got.unpack(), ref.weights(want, got.oc))
    assert got.digest() == f"{ref.digest(want, got.oc):016x}"


def test_channels_are_built_in_any_number_at_a_time(monkeypatch):
    whole, trims = build_hashed(checkpoint(), "qkv", 5, 16, 0.05, 1e-3, 50)
    monkeypatch.setattr(builder, "CHANNELS", 7)
    pieces, again = build_hashed(checkpoint(), "qkv", 5, 16, 0.05, 1e-3, 50)
    assert whole.digest() == pieces.digest() and trims == again


def test_bias_bytes_and_product():
    found = checkpoint(bias=True)
    w, _ = build_hashed(found, "qkv", 64, 32, 0.05, 0.0, ALL)
    x = np.random.default_rng(7).standard_normal((5, 33)).astype(np.float32)
    y = w(x)
    want = x @ dense(found)
    want[:, w.slices["k"]] += 3
    np.testing.assert_allclose(y[:, REAL], want[:, REAL], atol=2e-2)  # deltas are bf16
    stored = w.nbytes - w.bias.nbytes
    assert (
        w.bytes_read
        == stored - w.hashed.starts[:1].nbytes
        == w.hashed.blocks.nbytes * 3 + 4 * 33 + 2 * len(w.hashed.values)
    )
    assert w.bits == 8 * w.nbytes / (33 * sum(PARTS.values()))
    assert w.quant == "hashed" and "data" not in w.arrays()


def test_all_blocks_and_all_deltas_are_the_weights_within_bf16():
    found = checkpoint()
    w, trims = build_hashed(found, "qkv", 64, 32, 0.05, 0.0, ALL)
    off = np.abs(w.unpack() - dense(found))[:, REAL]
    base = builder.base(np.arange(33)[:, None], np.flatnonzero(REAL), 0.05)
    assert trims == 0 and (off <= 2.0**-8 * np.abs(dense(found)[:, REAL] - base) + 1e-9).all()


def test_the_heaviest_blocks_are_kept_and_of_equal_ones_the_first():
    rows = np.zeros((3, 64), np.float32)
    rows[0, 40], rows[0, 8:16] = 1, 0.1  # 1 and 8 * 0.01
    rows[0, 63] = 0.2  # less than the eight
    rows[1, [17, 25, 33]] = -0.5, 0.5, 0.5
    w, _ = one(rows)
    assert w.hashed.blocks.tolist() == [[1, 5], [2, 3], [0, 1]]
    assert w.fanout == 2
    assert (w.unpack()[0, 16:40] == 0).all()


def test_blocks_are_chosen_by_squares_not_by_sums():
    rows = np.zeros((1, 64), np.float32)
    rows[0, :8] = 0.3  # 0.72 in squares, 2.4 in sum
    rows[0, 20] = 1
    assert one(rows, fanout=1)[0].hashed.blocks.tolist() == [[2]]


def test_padding_is_no_weight():
    """A block of padding alone is never kept; the rest of a block has no deltas, whatever the hash gives there."""
    w, trims = one(np.full((2, 12), 0.1, np.float32), fanout=8)
    assert w.hashed.blocks.tolist() == [[0, 1]] * 2 and trims == 0
    assert w.hashed.bits.tolist() == [[255, 15]] * 2


def test_no_scale_leaves_the_weights_as_deltas():
    rows = np.random.default_rng(8).standard_normal((4, 64)).astype(np.float32)
    w, trims = one(rows, base_scale=0.0, fanout=8)
    assert trims == 0 and np.allclose(w.unpack(), rows, rtol=2.0**-8, atol=0)


# ---------------------------------------------------------------- shedding


def test_soft_and_hard_shedding_count_every_trim():
    rows = np.zeros((2, 64), np.float32)
    rows[0, :8] = 8, 7, 6, 5, 4, 3, 2, 1
    rows[1, :3] = -3, 2, -1
    given = {"base_scale": 0.0, "fanout": 1}
    whole, trims = one(rows, **given)
    assert trims == 0 and len(whole.hashed.values) == 16  # at eps 0 a delta of zero is kept too
    soft, trims = one(rows, eps=2.5, **given)
    assert trims == 2 + 7 and np.array_equal(soft.unpack(), np.where(np.abs(rows) >= 2.5, rows, 0))
    hard, trims = one(rows, watermark=2, **given)
    assert trims == 6 + 6 and hard.unpack()[0, :3].tolist() == [8, 7, 0] and hard.unpack()[1, :3].tolist() == [-3, 2, 0]
    both, trims = one(rows, eps=2.5, watermark=2, **given)
    assert trims == 6 + 7 and np.diff(both.hashed.starts).tolist() == [2, 1]


def test_what_is_exactly_eps_stays():
    rows = np.zeros((1, 64), np.float32)
    rows[0, :2] = 0.5, 0.25
    w, _ = one(rows, base_scale=0.0, fanout=1, eps=0.5)
    assert w.unpack()[0, :2].tolist() == [0.5, 0]


def test_of_equal_deltas_the_first_stay():
    rows = np.tile(np.float32([1, -1]), (1, 32))
    w, trims = one(rows, base_scale=0.0, fanout=8, watermark=3)
    assert trims == 61 and np.flatnonzero(w.unpack()).tolist() == [0, 1, 2]


def test_a_watermark_of_zero_leaves_the_hash():
    w, trims = build_hashed(checkpoint(), "qkv", 64, 32, 0.05, 0.0, 0)
    assert trims == 33 * sum(PARTS.values()) and len(w.hashed.values) == 0
    at = np.flatnonzero(REAL)
    assert np.array_equal(w.unpack()[:, at], builder.base(np.arange(33)[:, None], at, 0.05))


def test_shedding_later_is_shedding_at_once():
    whole, _ = build_hashed(checkpoint(), "qkv", 7, 16, 0.05, 0.0, ALL)
    for eps, watermark in ((1e-3, ALL), (0.0, 30), (0.02, 30), (10.0, ALL), (0.0, 0)):
        later, trimmed = whole.shed(eps, watermark)
        once, trims = build_hashed(checkpoint(), "qkv", 7, 16, 0.05, eps, watermark)
        assert trimmed == trims > 0 and later.digest() == once.digest() and later.nbytes == once.nbytes
        assert later.nbytes == whole.nbytes - 2 * trimmed
    assert whole.shed(0.0, ALL) == (whole, 0)


# ---------------------------------------------------------------- the hash


def test_base_is_the_reference_and_uniform():
    at = [(0, 0), (0, 1), (1, 0), (4095, 65535), (2**24 - 1, 500_000)]
    got = builder.base(np.array([c for c, _ in at]), np.array([o for _, o in at]), 0.05)
    assert got.tolist() == [float(ref.base(c, o, 0.05)) for c, o in at]
    many = builder.base(np.arange(256)[:, None], np.arange(256), 1.0)
    assert many.min() >= -1 and many.max() < 1 and len(np.unique(many)) > 65000
    assert abs(many.mean()) < 0.01 and abs(np.square(many).mean() - 1 / 3) < 0.01


def test_splitmix64_is_the_published_one():
    """The first numbers of its stream from state 0."""
    golden = 0x9E3779B97F4A7C15
    stream = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [ref.splitmix64(i * golden & ref.WORD) for i in range(3)] == stream


def test_digest_is_known():
    """The same on every machine."""
    rows = np.arange(128, dtype=np.float32).reshape(2, 64) / 64
    assert one(rows)[0].digest() == "d725c0c99f1227e9"


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(value):
    """Also where the block would not be kept."""
    rows = np.ones((2, 64), np.float32)
    rows[1, 50] = value
    with pytest.raises(RaloError, match="o has weights that are not finite"):
        one(rows)


def test_wrong_settings_are_refused():
    for change in ({"fanout": 0}, {"base_scale": -1.0}, {"base_scale": np.nan}, {"block": 64}):
        with pytest.raises(RaloError, match="hashed weights have"):
            one(np.ones((2, 64), np.float32), **change)


def test_no_block_is_the_word_of_the_kernels():
    assert _core.NO_BLOCK == ref.NO_BLOCK
