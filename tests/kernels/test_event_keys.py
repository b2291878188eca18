"""Attention that holds its keys for some tokens: the slot against the same rule in numpy, its counts, its state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernels.test_attention import KV
from kernels.test_block import normal
from kernels.test_pack_keys import Text
from pairwise import pairwise
from reference import attention as attention_ref
from reference import event as ref
from reference.keys import row_bytes

from ralo import _core

PLAIN = ref.KeysRule(keys=16, recent=8, age_max=8)
FIRST = 4 + 8 + 128 + 16 - 1  # the first position whose keys are not all read
GROUPS = ((2, 2), (4, 2), (4, 1), (10, 2))
ALL, NONE = float("inf"), -1.0  # limits: every head is held, none is


def slot(rule: ref.KeysRule) -> _core.EventKeys:
    return _core.EventKeys(
        rule.keys, [rule.limit], rule.sinks, rule.recent, rule.min_ctx, rule.age_max, rule.turn, rule.turns,
        rule.query_theta, rule.reuse_theta, rule.beta, rule.decay, half=[] if rule.half is None else [rule.half],
    )  # fmt: skip


def slow(kv: str = "f16", heads: tuple[int, int] = (4, 2), e: int = 32, n: int = 240, window: int = 0) -> Text:
    """A text whose queries look at few keys, and move a little from token to token."""
    text = Text(kv, heads, e, n, window)
    for t in range(1, n):
        text.q[t] = 0.95 * text.q[t - 1] + 0.31 * text.q[t]
    text.q *= 2
    return text


def reference(rule: ref.KeysRule, text: Text) -> ref.Keys:
    k, v = (
        attention_ref.load(rows, scales)[..., : text.e].swapaxes(0, 1)
        for rows, scales in zip(text.cache.rows, text.cache.scales, strict=True)
    )
    return ref.Keys(rule, k, v, text.heads[0], text.kv, text.window)


def by_head(text: Text, out: np.ndarray) -> np.ndarray:
    """(heads * e) -> (kv heads, those of a kv head)."""
    return out.reshape(text.heads[1], -1)


def not_dense(want: ref.Keys) -> int:
    """kv heads over the tokens that are not dense."""
    return want.kv_heads * (len(want.kinds) - want.kinds.count("dense"))


def compared(rule: ref.KeysRule, text: Text, first: int = FIRST - 3) -> tuple[ref.Keys, _core.EventKeys]:
    """Runs a text to its end, token by token, and compares every result and every count with the reference; heads that
    choose are dense bit for bit."""
    want, got, state = reference(rule, text), slot(rule), _core.LayerState()
    for t in range(first, text.n):
        out, read = text.counted(got, t, state=state)
        before = want.counts["bytes_read"]
        q = text.q[t].reshape(text.heads[0], text.e)
        np.testing.assert_allclose(out[0], want.step(q, t, text.scale).reshape(-1), atol=1e-4, err_msg=str(t))
        assert read == want.counts["bytes_read"] - before
        exact, same = by_head(text, text.exact(t)), want.chose[-1]
        assert np.array_equal(by_head(text, out)[same], exact[same])
        assert want.kinds[-1] != "dense" or np.array_equal(by_head(text, out), exact)
    counts = got.counts()
    assert counts.pop("error") == pytest.approx(want.counts.pop("error"), rel=1e-3)
    assert counts == want.counts and got.nonfinite == 0
    return want, got


RULES = (
    PLAIN,
    replace(PLAIN, age_max=20, turn=2, turns=3),
    replace(PLAIN, sinks=0, recent=40, keys=5),
    replace(PLAIN, sinks=9, keys=1, recent=1),
    replace(PLAIN, half=False),
    replace(PLAIN, keys=17, half=True),
)


@pytest.mark.parametrize(("kv", "heads", "e", "rule"), pairwise(KV, GROUPS, (20, 64, 128), RULES))
def test_held_attention_is_the_reference(level, kv, heads, e, rule):
    want, got = compared(rule, slow(kv, heads, e))
    assert {"choice", "held"} <= set(want.kinds)
    counts = got.counts()
    assert counts["choices"] == sum(map(len, want.chose)) and counts["held"] == not_dense(want) - counts["choices"]
    assert heads[1] == 1 or 1 in map(len, want.chose)  # one chooses, the other holds


@pytest.mark.parametrize(("kv", "heads", "e"), pairwise(KV, GROUPS, (20, 64, 128)))
def test_heads_that_are_not_served_read_all_keys(level, kv, heads, e):
    """The first kv head looks at everything alike, which the mean of the rest serves well; the others do not."""
    text = slow(kv, heads, e)
    text.q[:, : heads[0] // heads[1] * e] *= 0.01
    errors = [head.error for head in compared(PLAIN, text)[0].held]
    assert errors[0] == min(errors) and (len(errors) == 1 or errors[1] > 2 * errors[0])
    limit = 2 * errors[0]
    want, got = compared(replace(PLAIN, limit=limit), text)
    held, most = got.counts()["held"], not_dense(want) - got.counts()["choices"]
    assert 0 < held < most if heads[1] > 1 else 0 < held <= most


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(
    "settings", [{"limit": NONE}, {"min_ctx": 241}, {"age_max": 1}, {"keys": 200}, {"recent": 100}, {"sinks": 100}],
    ids=str,
)  # fmt: skip
def test_dense_bit_for_bit(level, threads, kv, settings):
    text, rule = slow(kv), replace(PLAIN, **settings)
    got, state = slot(rule), _core.LayerState()
    for t in range(FIRST - 2, text.n):
        assert np.array_equal(text.run(got, t, state=state), text.exact(t))
    assert got.counts()["held"] == 0 and (state.nbytes == 0 or settings == {"age_max": 1})


def test_on_differs_from_dense(level):
    text, got, state = slow(), slot(PLAIN), _core.LayerState()
    pairs = [(text.run(got, t, state=state), text.exact(t)) for t in range(FIRST - 5, 240)]
    same = np.array([(by_head(text, ours) == by_head(text, exact)).all(axis=1) for ours, exact in pairs])
    assert same[:6].all() and (~same).sum() == 2 * (240 - FIRST) - got.counts()["choices"]
    assert (same[6:].sum(axis=1) < 2).all()  # one at most chooses


def test_the_first_choice_is_all_heads(level):
    want, _ = compared(PLAIN, slow(heads=(6, 3)), FIRST)
    assert want.chose[0] == [0, 1, 2] and max(map(len, want.chose[1:])) == 1


def test_few_keys_are_all_read(level):
    text, rule = slow(), replace(PLAIN, min_ctx=200)
    want, _ = compared(rule, text, 150)
    assert want.kinds[: 199 - 150] == ["dense"] * 49 and want.kinds[49] == "choice"


@pytest.mark.parametrize("heads", [(4, 2), (6, 3), (4, 1)], ids=str)
@pytest.mark.parametrize(("age_max", "turn", "turns"), [(8, 0, 1), (8, 5, 8), (8, 13, 20), (20, 1, 12), (100, 11, 12)])
def test_when_a_choice_is_made(level, heads, age_max, turn, turns):
    """At the first token, then in turn, layer by layer and head by head; and never is one held for longer."""
    want, got = compared(replace(PLAIN, age_max=age_max, turn=turn, turns=turns), slow(heads=heads), FIRST)
    for h in range(heads[1]):
        made = [FIRST + t for t, chose in enumerate(want.chose) if h in chose]
        at = (turn * heads[1] + h) * age_max // (turns * heads[1])
        assert made == [t for t in range(FIRST, 240) if t == FIRST or (t - at) % age_max == 0]
        assert max(np.diff([*made, 240]), default=0) <= age_max
    assert got.counts()["choices"] == sum(map(len, want.chose))


def test_a_choice_is_not_held_for_longer_than_age_max(level):
    """Places where it was their turn were not run: heads choose at 180 and 200, and at 170 and 190."""
    text, got, state = slow(), slot(replace(PLAIN, age_max=20)), _core.LayerState()
    steps = ((163, {0, 1}), (170, {1}), (182, set()), (183, {0}), (189, set()), (202, {1}), (203, {0}), (204, set()))
    for t, chose in steps:
        before = got.counts()["choices"]
        out, exact = by_head(text, text.run(got, t, state=state)), by_head(text, text.exact(t))
        assert got.counts()["choices"] - before == len(chose)
        assert {h for h in range(2) if np.array_equal(out[h], exact[h])} == chose


@pytest.mark.parametrize("theta", [0.1, 0.5, 1.5])
def test_a_query_that_moved_chooses_anew(level, theta):
    text = slow()
    want, _ = compared(replace(PLAIN, query_theta=theta, age_max=50), text, FIRST)
    choices = [sum(h in chose for chose in want.chose) for h in range(2)]
    assert all(n == len(want.kinds) if theta == 0.1 else n < len(want.kinds) for n in choices)
    assert min(choices) > 3 or theta > 1


@pytest.mark.parametrize("moves", [0, 1])
def test_only_the_head_whose_queries_moved_chooses_anew(level, moves):
    text = slow()
    text.q[:] = text.q[0]
    text.q[185:, 64 * moves : 64 * moves + 64] *= 2
    want, _ = compared(replace(PLAIN, query_theta=0.9, age_max=200, turn=11, turns=16), text, FIRST)
    assert {FIRST + t: chose for t, chose in enumerate(want.chose) if chose} == {FIRST: [0, 1], 185: [moves]}


@pytest.mark.parametrize(("beta", "decay"), [(1.0, 0.0), (0.9, 0.1)])
def test_a_head_that_barely_moves_gives_its_result_again(level, beta, decay):
    text = slow()
    text.q[200:220] = text.q[200]
    text.q[200:220, 64:] += normal(20, 64)  # the second kv head does move
    rule = replace(PLAIN, reuse_theta=0.05, beta=beta, decay=decay, age_max=16)
    want, got = compared(rule, text, FIRST)
    assert 10 <= got.counts()["reused"] <= 30
    without, _ = compared(replace(rule, reuse_theta=0), text, FIRST)
    assert without.counts["kept"] > want.counts["kept"]


@pytest.mark.parametrize("theta", [0.1, 0.15, 0.2, 0.25, 0.3])
def test_how_far_a_head_must_move(level, theta):
    want, got = compared(replace(PLAIN, reuse_theta=theta, age_max=16), slow(), FIRST)
    assert 0 < got.counts()["reused"] < not_dense(want) - got.counts()["choices"] or theta == 0.1


def test_a_head_that_chooses_gives_nothing_again(level):
    """Its result is a new one. Two tokens are needed at first to know how far one moves."""
    text, got, state = slow(), slot(replace(PLAIN, reuse_theta=10.0, age_max=16)), _core.LayerState()
    for t in range(160, 240):
        before = got.counts()["reused"]
        text.run(got, t, state=state)
        assert got.counts()["reused"] - before == (0 if t < 162 else 1 if t % 8 == 0 else 2)


@pytest.mark.parametrize("kv", KV)
def test_beyond_its_window_it_is_dense(level, kv):
    text = slow(kv, window=200)
    want, _ = compared(PLAIN, text, FIRST)
    assert want.kinds[200 - FIRST :] == ["dense"] * 40 and "held" in want.kinds[: 200 - FIRST]
    assert want.counts["keys"] == 2 * (sum(range(FIRST + 1, 201)) + 40 * 200)


@pytest.mark.parametrize("settings", [{}, {"limit": 0.3}, {"reuse_theta": 0.2}, {"query_theta": 0.8}], ids=str)
@pytest.mark.parametrize(("kv", "window"), [("f32", 0), ("f16", 0), ("int8", 220), ("f16", 210)])
def test_several_tokens_equal_one_by_one(level, threads, kv, window, settings):
    text, rule = slow(kv, window=window), replace(PLAIN, **settings)
    many, single, state = slot(rule), slot(rule), _core.LayerState()
    alone = np.concatenate([text.run(single, t, state=state) for t in range(150, 240)])
    together = text.run(many, 150, 90)
    dense = np.array([t < FIRST or (window and t >= window) for t in range(150, 240)])
    assert np.array_equal(together[~dense], alone[~dense])
    np.testing.assert_allclose(together[dense], alone[dense], atol=1e-5)
    ours, theirs = many.counts(), single.counts()
    for name in ("tokens", "heads", "held", "reused", "choices", "keys", "kept", "error"):
        assert ours[name] == theirs[name]
    assert ours["bytes_read"] <= theirs["bytes_read"]  # dense tokens share what they read


def test_same_bits_at_any_number_of_threads(level, threads):
    text = slow("f16", (6, 3), 16, 1400)
    rule = replace(PLAIN, keys=100, limit=0.2, reuse_theta=0.1)
    out = text.run(slot(rule), 1300, 40)
    _core.set_threads(1)
    assert np.array_equal(out, text.run(slot(rule), 1300, 40))
    _core.set_threads(threads)


def test_what_is_counted(level):
    """By hand, for a token at which both heads choose, one at which the second does, and one at which none does."""
    text, state, got = slow("int8", e=20), _core.LayerState(), slot(PLAIN)
    row, n = row_bytes("int8", 20), FIRST + 1
    until = (n - 8) // 64 * 64
    _, read = text.counted(got, FIRST, state=state)
    assert read == 2 * row * (3 * n + 2 * (4 + 16) + 2 * until)  # all, keys again, those chosen, and sums
    first = got.counts()
    assert first == {
        "tokens": 1, "heads": 2, "held": 0, "reused": 0, "choices": 2, "keys": 2 * n, "kept": 2 * n, "error": 0,
        "bytes_read": read, "bytes_skipped": 2 * n * 2 * row - read,
    }  # fmt: skip
    _, read = text.counted(got, FIRST + 1, state=state)
    n, kept = n + 1, 4 + 16 + n + 1 - until
    assert read == row * (2 * (2 * kept + n) + n + 2 * (4 + 16))  # what both hold, all, keys again, those chosen
    second = got.counts()
    now = {name: value - first[name] for name, value in second.items()}
    assert 0.01 < now.pop("error") < 1
    assert now == {
        "tokens": 1, "heads": 2, "held": 1, "reused": 0, "choices": 1, "keys": 2 * n, "kept": 2 * kept + n,
        "bytes_read": read, "bytes_skipped": 2 * n * 2 * row - read,
    }  # fmt: skip
    _, read = text.counted(got, FIRST + 2, state=state)
    n, kept = n + 1, kept + 1
    assert read == 2 * kept * 2 * row
    now = {name: value - second[name] for name, value in got.counts().items()}
    assert now == {
        "tokens": 1, "heads": 2, "held": 2, "reused": 0, "choices": 0, "keys": 2 * n, "kept": 2 * kept, "error": 0,
        "bytes_read": read, "bytes_skipped": 2 * n * 2 * row - read,
    }  # fmt: skip


@pytest.mark.parametrize("half", [None, True])
def test_keys_that_are_not_held_are_not_read(level, half):
    """Rubbish there changes no bit until the next choice."""
    rule = replace(PLAIN, turn=7, turns=16, age_max=16, half=half)
    text, got, state = slow(), slot(rule), _core.LayerState()
    text.run(got, 180, state=state)
    want = reference(rule, text)
    want.step(text.q[180].reshape(4, 32), 180, text.scale)
    copy = state.clone()
    clean = [text.run(got, t, state=state) for t in (181, 182)]
    for h, head in enumerate(want.held):
        others = np.setdiff1d(np.arange(4, head.until), (head.half if half else head.all).chosen)
        assert len(others) > 100
        for rows in text.cache.bytes:
            rows[h, others] = 0xFF
    assert np.array_equal([text.run(got, t, state=copy) for t in (181, 182)], clean) and got.nonfinite == 0


ENDS = ((185, 190), (184, 190), (184, 192), (184, 184), (181, 190), (191, 199))


@pytest.mark.parametrize("settings", [{}, {"limit": 0.3}, {"query_theta": 0.8}], ids=str)
@pytest.mark.parametrize("kv", KV)
def test_trim_takes_back_the_last_choice_of_each_head(level, kv, settings):
    """As if the tokens after it had never been: choices at 160, 168, 176, ... and at 164, 172, 180, ..."""
    text, rule = slow(kv), replace(PLAIN, **settings)
    ends = ENDS if "query_theta" not in settings else ()  # with which there may be more choices than one
    for to, end in (*ends, *((t, t + 1) for t in range(180, 190))):
        state, fresh, got = _core.LayerState(), _core.LayerState(), slot(rule)
        text.run(got, FIRST, end - FIRST, state)
        text.run(got, FIRST, to - FIRST, fresh)
        state.trim(to)
        assert np.array_equal(text.run(got, to, 240 - to, state), text.run(got, to, 240 - to, fresh)), (to, end)


def test_a_head_that_made_two_choices_chooses_anew(level):
    """The first made one at 184, which is taken back; the second at 180 and 188, before which nothing is known."""
    text, got, state, fresh = slow(), slot(PLAIN), _core.LayerState(), _core.LayerState()
    text.run(got, FIRST, 190 - FIRST, state)
    text.run(got, FIRST, 177 - FIRST, fresh)
    state.trim(177)
    before = got.counts()
    out = by_head(text, text.run(got, 177, state=state))
    now = {name: value - before[name] for name, value in got.counts().items()}
    assert now["choices"] == now["held"] == 1 and now["error"] == 0
    want, exact = (by_head(text, x) for x in (text.run(got, 177, state=fresh), text.exact(177)))
    assert np.array_equal(out[0], want[0]) and not np.array_equal(want, exact) and np.array_equal(out[1], exact[1])


def test_after_more_choices_all_heads_choose_anew(level):
    text, got, state = slow(), slot(PLAIN), _core.LayerState()
    text.run(got, FIRST, 200 - FIRST, state)
    state.trim(170)
    before = got.counts()["choices"]
    assert np.array_equal(text.run(got, 170, state=state), text.exact(170)) and got.counts()["choices"] == before + 2


@pytest.mark.parametrize("length", [185, 191, 192, 193])
def test_another_end_of_the_text(level, length):
    """Around the end of a block: sums of keys that are gone are gone when the next choices are made, at 200 and 210."""
    rule = replace(PLAIN, age_max=20, recent=0, keys=4)
    text, got, state = slow(), slot(rule), _core.LayerState()
    text.run(got, 140, 60, state)
    before = text.run(got, 200, 40, state.clone())
    state.trim(length)
    text.k[length:], text.v[length:] = normal(2, 240 - length, 64, seed=9) * 2
    text.store(length)
    after, fresh, other = text.run(got, length, 240 - length, state), _core.LayerState(), slot(rule)
    text.run(other, 140, length - 140, fresh)
    assert np.array_equal(after, text.run(other, length, 240 - length, fresh))
    assert not np.array_equal(after[200 - length :], before)


@pytest.mark.parametrize("settings", [{}, {"reuse_theta": 0.5, "beta": 0.9}], ids=str)
def test_a_clone_goes_on_alike(level, settings):
    text, got, state = slow(), slot(replace(PLAIN, **settings)), _core.LayerState()
    text.run(got, FIRST, 180 - FIRST, state)
    copy, other = state.clone(), state.clone()
    on = text.run(got, 180, 30, state)
    other.trim(0)  # does not reach the copy
    assert np.array_equal(on, text.run(got, 180, 30, copy)) and copy.nbytes > 0


@pytest.mark.parametrize("reuse", [0.0, 0.1])
def test_memory(level, reuse):
    """Sums by blocks, two choices of each head, and where results are given again the last one."""
    text, got, state = slow(e=20), slot(replace(PLAIN, reuse_theta=reuse)), _core.LayerState()
    assert state.nbytes == 0
    text.run(got, FIRST, 200 - FIRST, state)
    sums, ep = 2 * 3 * 2 * 32, 32
    choices = [16 + n + 2 * ep + 2 + 2 * ep for n in (185, 193, 189, 197)]
    last = 4 * 20 + 2 + 2 if reuse else 0
    least = 4 * (sums + sum(choices) + last)
    assert least <= state.nbytes <= 1.6 * least
    assert state.clone().nbytes >= least


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_planted_nan_is_caught(level, tokens):
    text, got, state = slow(), slot(PLAIN), _core.LayerState()
    text.run(got, FIRST, 182 - FIRST, state)
    copy = state.clone()
    _, read = text.counted(got, 182, tokens, copy)
    got.plant, before = True, got.counts()
    out, more = text.counted(got, 182, tokens, state)
    assert np.array_equal(out, text.exact(182, tokens)) and more > read
    assert got.nonfinite == 1 and not got.plant and state.nbytes == 0
    now = {name: value - before[name] for name, value in got.counts().items()}
    dense = 2 * 2 * sum(range(183, 183 + tokens)) * row_bytes("f16", 32)
    assert now["bytes_read"] == more and now["bytes_skipped"] == dense - more
    assert np.array_equal(text.run(got, 182 + tokens, state=state), text.exact(182 + tokens))  # a choice
    assert got.nonfinite == 1


@pytest.mark.parametrize("at", [160, 163, 164])  # its head chooses, none does, the other one does
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_queries_are_what_dense_makes_of_them(level, bad, at):
    text, got, state = slow(), slot(PLAIN), _core.LayerState()
    text.run(got, FIRST, at - FIRST, state)
    text.q[at, 5] = bad
    out = text.run(got, at, state=state)
    np.testing.assert_array_equal(out, text.exact(at))
    assert np.isnan(out).any() and got.nonfinite == 1 and state.nbytes == 0
    assert np.isfinite(text.run(got, at + 1, state=state)).all() and got.nonfinite == 1


def test_a_level_says_which_error_is_borne(level):
    pacer = _core.Pacer(2, 1, 0)
    got = _core.EventKeys(16, [NONE, ALL], 4, 8, 0, 64, layer=0, pacer=pacer)
    text, state = slow(), _core.LayerState()
    for t, use, held in ((180, 0, 0), (181, 1, 0), (182, 1, 2), (183, 0, 2), (184, 1, 4)):
        pacer.replay([use])
        out = text.run(got, t, state=state)
        assert got.counts()["held"] == held and np.array_equal(out, text.exact(t)) == (use == 0 or t == 181)


def test_a_level_says_whether_half_of_the_keys_do(level):
    """The better half is known whichever is read: going from one to the other gives what each gives alone."""
    pacer = _core.Pacer(2, 1, 0)
    got = _core.EventKeys(16, [ALL, ALL], 4, 8, 0, 64, layer=0, pacer=pacer, half=[False, True])
    alone = [slot(replace(PLAIN, age_max=64, half=half)) for half in (False, True)]
    text, state, states = slow(), _core.LayerState(), [_core.LayerState(), _core.LayerState()]
    for t, use in ((180, 1), (181, 0), (182, 1), (183, 1), (184, 0)):
        pacer.replay([use])
        out, both = text.run(got, t, state=state), [text.run(alone[i], t, state=states[i]) for i in (0, 1)]
        assert np.array_equal(out, both[use]) and (t == 180 or not np.array_equal(*both))
    assert alone[1].counts()["kept"] < alone[0].counts()["kept"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"half": [True, False]},
        {"keys": 0},
        {"age_max": 0},
        {"limits": []},
        {"limits": [1.0, 2.0]},
        {"sinks": 1 << 20},
        {"recent": 1 << 20},
        {"keys": 1 << 30},
        {"pacer": _core.Pacer(1, 1, 0), "layer": 1},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError):
        _core.EventKeys(**{"keys": 8, "limits": [1.0]} | wrong)


@pytest.mark.parametrize(("layers", "kv", "age_max"), [(12, 5, 32), (8, 3, 32), (16, 8, 32), (2, 2, 32), (3, 2, 8)])
def test_no_token_has_many_choices_to_make(level, layers, kv, age_max):
    """Over all layers they are spread as evenly as can be."""
    text, made = slow(heads=(kv, kv), n=FIRST + 3 * age_max), []
    slots = [slot(replace(PLAIN, age_max=age_max, turn=i, turns=layers)) for i in range(layers)]
    states = [_core.LayerState() for _ in slots]
    for t in range(FIRST, FIRST + 3 * age_max):
        before = sum(one.counts()["choices"] for one in slots)
        for one, state in zip(slots, states, strict=True):
            text.run(one, t, state=state)
        made.append(sum(one.counts()["choices"] for one in slots) - before)
    assert made[0] == layers * kv
    assert max(made[age_max:]) <= -(-layers * kv // age_max)
