"""Packed keys over time: what a text remembers, what is counted, checks that switch heads off, and broken numbers."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_attention import KV
from kernels.test_block import normal
from kernels.test_pack_keys import CODES, Text, slot
from pairwise import pairwise
from reference import codes as codes_ref
from reference.keys import row_bytes

from ralo import _core

FORMS = pytest.mark.parametrize("code", CODES)


def block_bytes(text: Text, code: str) -> int:
    """Codes of one block and kv head: bits, scales, mean."""
    ep = -(-text.e // 16) * 16
    return 64 * (8 * codes_ref.Form(code).words(ep) + 2) + 2 * ep


def dense_bytes(text: Text, past: int) -> int:
    return 2 * text.heads[1] * (min(past + 1, text.window) if text.window else past + 1) * row_bytes(text.kv, text.e)


@FORMS
def test_a_clone_goes_on_alike(level, code):
    text, packed, state = Text(n=500), slot(code=code, check_every=50, limit=0.3), _core.LayerState()
    text.run(packed, 300, 20, state)
    copy = state.clone()
    on = text.run(packed, 320, 150, state)
    assert np.array_equal(on, text.run(packed, 320, 150, copy))
    assert copy.nbytes > 0


@FORMS
def test_memory_grows_with_the_text(level, code):
    text, packed, state = Text(n=700), slot(code=code), _core.LayerState()
    sizes = []
    for past in (100, 200, 450, 690):
        text.run(packed, past, state=state)
        sizes.append(state.nbytes)
    least = 2 * 10 * (block_bytes(text, code) + 4 * text.e)  # ten blocks, with their sums of values
    assert sizes[0] == 0 < sizes[1] < sizes[2] < sizes[3] and least <= sizes[3] < 2.5 * least


@FORMS
@pytest.mark.parametrize("length", [255, 256, 257, 318, 319, 320, 321])
@pytest.mark.parametrize("told", [True, False], ids=["trim", "stored over"])
def test_another_end_of_the_text(level, code, length, told):
    """Around the ends of blocks: codes of keys that are gone are gone, whether by trim or by running a place again."""
    text, packed, state = Text(n=400), slot(code=code), _core.LayerState()
    before = text.run(packed, 200, 200, state)
    if told:
        state.trim(length)
    text.k[length:], text.v[length:] = normal(2, 400 - length, 64, seed=9) * 2
    text.store(length)
    after = text.run(packed, length, 400 - length, state)
    assert np.array_equal(after, text.run(slot(code=code), length, 400 - length))
    assert not np.array_equal(after, before[length - 200 :])


def test_trim_forgets_checks(level):
    text, state = Text(n=400), _core.LayerState()
    strict = slot(check_every=100, phase=50, limit=0)
    text.run(strict, 250, state=state)
    assert np.array_equal(text.run(strict, 260, state=state), text.exact(260))
    state.trim(251)
    assert np.array_equal(text.run(strict, 260, state=state), text.exact(260))
    state.trim(250)
    assert not np.array_equal(text.run(strict, 260, state=state), text.exact(260))


@pytest.mark.parametrize("codes", [("signs", "ternary"), ("difference", "overlap"), ("signs", "signs")])
def test_codes_of_another_form_are_not_used(level, codes):
    """A plan may change while a text goes on."""
    text, state = Text(n=400), _core.LayerState()
    for i, code in enumerate((*codes, codes[0])):
        packed = slot(code=code, eps=-1.0 - 0.3 * i)
        assert np.array_equal(text.run(packed, 399, state=state), text.run(packed, 399))


@pytest.mark.parametrize(("kv", "window", "code", "e"), pairwise(KV, (0, 250), tuple(CODES), (16, 20, 80)))
def test_counters(level, kv, window, code, e):
    text, packed, state = Text(kv, e=e, n=700, window=window), slot(code=code), _core.LayerState()
    _, read = text.counted(packed, 600, 5, state)
    first = packed.counts()
    assert read == first["bytes_read"] and first["heads"] == first["packed"] == 10 and first["checks"] == 0
    _, read = text.counted(packed, 605, state=state)  # no block ends here, so that no key is read to be coded
    now = {name: value - first[name] for name, value in packed.counts().items()}
    keys = window or 606
    assert now["keys"] == 2 * keys and now["heads"] == now["packed"] == 2
    fixed = (0 if window else 4) + 606 - 576
    blocks = 9 - (606 - window) // 64 if window else 9  # between the first keys and the last
    assert 2 * fixed < now["kept"] <= 2 * (fixed + 16)  # a sample sets the bound: some may be missing
    assert now["bytes_read"] == read == now["kept"] * 2 * row_bytes(kv, e) + 2 * blocks * block_bytes(text, code)
    assert now["bytes_skipped"] == dense_bytes(text, 605) - read > 0


def test_coding_a_block_reads_its_keys_and_values_once(level):
    text, packed, state = Text(n=700), slot(), _core.LayerState()
    reads = [text.counted(packed, past, state=state)[1] for past in range(638, 642)]
    again = [text.counted(slot(), past, state=state)[1] for past in (640, 641)]
    assert reads[2:] == again  # known from then on
    counts = packed.counts()
    dense = sum(dense_bytes(text, past) for past in range(638, 642))
    assert counts["bytes_read"] == sum(reads) == dense - counts["bytes_skipped"]


@FORMS
def test_checks_are_exact_and_tell_how_good_it_is(level, code):
    text, packed, state = Text(n=400, loud=2), slot(code=code, check_every=1, limit=100), _core.LayerState()
    for past in range(300, 310):
        out, read = text.counted(packed, past, state=state)
        assert np.array_equal(out, text.exact(past)) and read > dense_bytes(text, past)
    counts = packed.counts()
    assert counts["checks"] == 10 and counts["bytes_skipped"] < 0 and counts["packed"] == 20
    assert 0 < counts["recall"] / 10 <= 1 and 0 < counts["mass"] / 10 <= 1 and counts["error"] > 0


def test_checks_know_a_perfect_choice(level):
    text = Text(n=400, loud=2)
    packed = slot(keep_abs=399, check_every=1)  # all that there are besides the last one
    text.run(packed, 399)
    counts = packed.counts()
    assert counts["recall"] == pytest.approx(1) and counts["mass"] == pytest.approx(1, rel=1e-5)
    assert counts["error"] < 1e-4


def test_checks_by_phase(level):
    text = Text(n=400)
    for every, phase, at in ((10, 3, 303), (10, 23, 303), (7, 0, 301)):
        for past in range(300, 305):
            packed = slot(check_every=every, phase=phase)
            text.run(packed, past)
            assert packed.counts()["checks"] == (past == at)


def test_a_limit_switches_heads_off(level):
    text, state = Text(n=400), _core.LayerState()
    strict = slot(check_every=50, limit=0)
    text.run(strict, 299, 2, state)
    before = strict.counts()
    assert before["checks"] == 1 and before["packed"] == before["heads"] == 4
    coded = 0
    for past in range(301, 349):
        out, read = text.counted(strict, past, state=state)
        assert np.array_equal(out, text.exact(past)) and read - dense_bytes(text, past) in (0, 64 * 4 * 64)
        coded += read - dense_bytes(text, past)
    after = strict.counts()
    assert after["packed"] == before["packed"] and after["heads"] == before["heads"] + 2 * 48
    assert after["bytes_skipped"] == before["bytes_skipped"] - coded
    generous = slot(check_every=50, limit=1e9)
    assert not np.array_equal(text.run(generous, 349, state=state), text.exact(349))
    assert generous.counts()["packed"] == 2


def test_one_head_may_be_off_and_come_back(level):
    """Head 1 looks at everything alike, which a few keys cannot tell, until it looks at its last key alone."""
    text = Text(n=400, heads=(2, 2), loud=0)
    half = text.e
    text.q[:, :half] = 30 * text.k[:, :half]  # head 0 looks at its own key
    text.q[350:, half:] = 30 * text.k[350:, half:]
    packed, state = slot(check_every=50, limit=0.05, rest=False), _core.LayerState()
    text.run(packed, 300, state=state)
    for past, packs in ((320, 1), (349, 1), (350, 1), (351, 2)):  # it is looked at again at 350
        before, out = packed.counts()["packed"], text.run(packed, past, state=state)
        assert packed.counts()["packed"] - before == packs
        assert packs == 2 or np.array_equal(out[:, half:], text.exact(past)[:, half:])


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_planted_nan_is_caught(level, tokens):
    text, packed, state = Text(n=400), slot(), _core.LayerState()
    clean, read = text.counted(packed, 300, tokens, state)
    packed.plant, before = True, packed.counts()
    out, more = text.counted(packed, 300, tokens, state)
    assert np.array_equal(out, text.exact(300, tokens)) and more > read - dense_bytes(text, 300)
    assert packed.nonfinite == 1 and not packed.plant
    dense = sum(dense_bytes(text, past) for past in range(300, 300 + tokens))
    assert packed.counts()["bytes_skipped"] - before["bytes_skipped"] == dense - more
    assert packed.counts()["bytes_read"] - before["bytes_read"] == more
    assert np.array_equal(text.run(packed, 300, tokens, state), clean) and packed.nonfinite == 1


@pytest.mark.parametrize("check_every", [0, 1])
@pytest.mark.parametrize(("kv", "code"), pairwise(KV, tuple(CODES)))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_queries_are_what_dense_makes_of_them(level, kv, code, bad, check_every):
    text = Text(kv, n=400)
    text.q[399, 5] = bad
    packed = slot(code=code, check_every=check_every)
    out = text.run(packed, 399)
    np.testing.assert_array_equal(out, text.exact(399))
    assert packed.nonfinite == 1 and np.isnan(out[0, : text.e]).any()


@pytest.mark.parametrize("check_every", [0, 1])
@pytest.mark.parametrize("at", [1, 100, 395])  # always read; packed; after the last block
@pytest.mark.parametrize(("kv", "code"), pairwise(KV, tuple(CODES)))
def test_broken_keys_break_nothing_else(level, kv, code, at, check_every):
    """The other head is as ever; of this one the result is finite, or what dense makes of it."""
    text, half = Text(kv, (2, 2), n=400), 32
    clean = text.run(slot(code=code, check_every=check_every), 399)
    for rows, scales in zip(text.cache.rows, text.cache.scales, strict=True):
        if scales is None:
            rows[0, at, 3] = np.nan
        else:
            scales[0, at] = np.nan
    packed = slot(code=code, check_every=check_every)
    out, exact = text.run(packed, 399), text.exact(399)
    assert np.isnan(exact[0, :half]).any()
    if packed.nonfinite:
        np.testing.assert_array_equal(out, exact)
    else:
        assert np.isfinite(out).all() and np.array_equal(out[:, half:], clean[:, half:])
