"""Several texts in one pass over the weights: each gets, bit for bit, what it gets alone."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pairwise import pairwise
from test_mix import NAN, damage
from test_proc import pack, write_model
from test_proc import using as using_seeds
from test_tt import using as using_factors
from tiny import write_hf
from tiny_factors import write_pack

import ralo
from ralo import KWTA, Event, Mix, RaloError, StatePack, _core
from ralo.compose import compose
from ralo.guard import GuardOptions
from ralo.lm import LM
from ralo.matrix import QUANTS
from ralo.model import FEW, Model
from ralo.modes.base import Mode, Override
from ralo.plan import Setup
from ralo.sequence import KV_KINDS, Sequence
from ralo.weights import PLACES

F32 = NDArray[np.float32]
CONTEXT = 1024
TOKENS = np.random.default_rng(6).integers(2, 97, CONTEXT).tolist()
LENGTHS = (1, 700, 64, 2, 130, 513, 65, 7, 300, 5, 512, 33, 1, 190, 511, 17, 250) * 2  # of up to 34 texts
MOST = _core.SHARED_TOKENS
COUNTS = (1, 2, 7, FEW, FEW + 1, MOST + 1, 2 * MOST + 1)
SIZES = {"hidden_size": 128, "intermediate_size": 160, "max_position_embeddings": CONTEXT}
ROUNDS = 3  # tokens that every text gets


def opened(folder: Path, *modes: Mode, quant: str = "int8", kv: str = "f16") -> LM:
    return ralo.load(folder, quant, kv, setup=Setup(compose(modes), GuardOptions(on="off")))


def begun(model: Model, lengths: Many[int], kv: str = "f16") -> list[Sequence]:
    """Texts of these lengths, all different."""
    texts = [Sequence.empty(model.cfg, kv) for _ in lengths]
    for i, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        model.prefill([TOKENS[i], *TOKENS[: length - 1]], text)
    return texts


def assert_as_alone(model: Model, texts: list[Sequence], dense: Many[bool] = (), rounds: int = ROUNDS) -> F32:
    """Scores of every round (rounds, N, V). Copies run alone beside the texts."""
    dense, copies, found = dense or [False] * len(texts), [text.clone() for text in texts], []
    for n in range(rounds):
        tokens = [TOKENS[3 * n + i] for i in range(len(texts))]
        alone = [model.step(*one) for one in zip(tokens, copies, dense, strict=True)]
        together = model.steps(tokens, texts, dense)
        assert together.shape == (len(texts), model.cfg.vocab)
        for i, scores in enumerate(alone):
            assert np.array_equal(together[i], scores), f"text {i} of {len(texts)} in round {n}"
        assert [text.tokens for text in texts] == [copy.tokens for copy in copies]
        found.append(together)
    for text, copy, d in zip(texts, copies, dense, strict=True):  # the same again: what is stored is the same too
        assert np.array_equal(model.step(5, text, d), model.step(5, copy, d))
    return np.stack(found)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("texts") / "llama", "llama", **SIZES)


# ---------------------------------------------------------------- dense


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("quant", QUANTS)
def test_every_level_and_precision(directory: Path, level: str, quant: str, kv: str) -> None:
    model = opened(directory, quant=quant).model
    assert_as_alone(model, begun(model, LENGTHS[: FEW + 1], kv))


@pytest.mark.parametrize(("count", "quant"), pairwise(COUNTS, QUANTS))
def test_every_number_of_texts(directory: Path, threads: int, count: int, quant: str) -> None:
    model = opened(directory, quant=quant).model
    found = assert_as_alone(model, begun(model, LENGTHS[:count]))
    _core.set_threads(1)
    assert np.array_equal(found, assert_as_alone(model, begun(model, LENGTHS[:count])))


@pytest.mark.parametrize("quant", QUANTS)
def test_matrices_that_are_cut_for_threads(tmp_path: Path, threads: int, quant: str) -> None:
    """By channels, each part with sums of its own."""
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 1100, "num_hidden_layers": 1}
    model = opened(write_hf(tmp_path, "llama", **sizes), quant=quant).model
    assert_as_alone(model, begun(model, LENGTHS[:11]), rounds=1)


@pytest.mark.parametrize("quant", ["f32", "int8"])
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "opt", "gpt2"])
def test_architectures(tmp_path: Path, kind: str, quant: str) -> None:
    """Windows, biases, norms of heads, positions."""
    longest = {"n_positions": CONTEXT} if kind == "gpt2" else {"max_position_embeddings": CONTEXT}
    model = opened(write_hf(tmp_path, kind, **longest), quant=quant).model
    assert_as_alone(model, begun(model, LENGTHS[: FEW + 1]))


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("window", [1, 7, 64, 600])
def test_windows(tmp_path: Path, window: int, kv: str) -> None:
    """Texts that are shorter than it, just as long, and longer."""
    folder = write_hf(tmp_path, "mistral", sliding_window=window, max_position_embeddings=CONTEXT)
    model = opened(folder).model
    assert_as_alone(model, begun(model, [window, 1, window + 1, 700, max(1, window - 2)], kv))


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (6, 2), (8, 2), (8, 1)], ids=str)
def test_heads_that_share_keys(tmp_path: Path, heads: tuple[int, int], kv: str) -> None:
    both = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    model = opened(write_hf(tmp_path, "llama", head_dim=24, **SIZES | both)).model
    assert_as_alone(model, begun(model, LENGTHS[:6], kv))


def test_angles_that_depend_on_the_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 8.0}
    model = opened(write_hf(tmp_path, "llama", max_position_embeddings=32, rope_scaling=scaling)).model
    assert_as_alone(model, begun(model, [1, 30, 31, 32, 33, 100]), rounds=5)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_texts(directory: Path, lengths: list[int], data: st.DataObject) -> None:
    model = opened(directory, KWTA(k=0.5, duty=2)).model
    dense = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    assert_as_alone(model, begun(model, lengths), dense, rounds=2)


def test_other_texts_change_nothing_wherever_one_stands(directory: Path) -> None:
    """The same text in every place among others, which are not the same each time."""
    model, want = opened(directory).model, None
    for at in range(FEW + 2):
        texts = begun(model, (LENGTHS[at:] + LENGTHS[:at])[: FEW + 2])
        [texts[at]] = begun(model, [100])
        scores = model.steps([9] * len(texts), texts, [False] * len(texts))[at]
        want = scores if want is None else want
        assert np.array_equal(scores, want)


@pytest.mark.parametrize("quant", QUANTS)
def test_many_texts_at_any_number_of_threads(tmp_path: Path, level: str, threads: int, quant: str) -> None:
    """Groups of texts for each thread, or parts of the weights."""
    model = opened(write_hf(tmp_path, "qwen2", **SIZES), quant=quant).model
    _core.set_threads(threads)
    assert_as_alone(model, begun(model, LENGTHS), rounds=1)


def test_texts_at_the_end_of_the_context(tmp_path: Path) -> None:
    model = opened(write_hf(tmp_path, "llama", max_position_embeddings=20)).model
    texts = begun(model, [19, 3, 10])
    assert_as_alone(model, [text.clone() for text in texts][1:])
    model.steps([5, 6, 7], texts, [False] * 3)
    lengths = [len(text) for text in texts]
    with pytest.raises(RaloError, match="21 tokens are more than the model's context of 20"):
        model.steps([5, 6, 7], texts, [False] * 3)
    assert [len(text) for text in texts] == lengths == [20, 4, 11]


@pytest.mark.parametrize("count", COUNTS)
def test_weights_are_read_once_for_a_few_texts(tmp_path: Path, threads: int, count: int) -> None:
    """And keys and values of every text's own. Where there are groups of texts for all threads, each has as many."""
    model = opened(write_hf(tmp_path, "mistral", max_position_embeddings=CONTEXT, sliding_window=100)).model
    texts, cfg = begun(model, LENGTHS[:count]), model.cfg
    _core.set_threads(threads)
    before = model.bytes_read
    model.steps([5] * count, texts, [False] * count)
    keys = sum(min(len(text), 100) for text in texts)
    cache = cfg.n_layers * cfg.n_kv_heads * keys * 2 * 2 * cfg.head_dim
    weights = sum(m.data.nbytes + m.scales.nbytes for m in model.weights.matrices().values() if m.scales is not None)
    groups = -(-count // MOST)
    if groups >= threads:
        groups = -(-groups // threads) * threads
    assert model.bytes_read - before == groups * weights + cache


# ---------------------------------------------------------------- with modes

SHORT = Event(keys=16, min_ctx=0, hold=8)
MODES: dict[str, tuple[Mode, ...]] = {
    "kwta": (KWTA(k=0.4),),
    "kwta, neurons": (KWTA(k=0.4, gate="on"),),
    "kwta, duty": (KWTA(k=0.4, duty=4, renorm="on"),),
    "kwta, keys": (KWTA(k=0.9, keys=0.3, keys_min=8),),
    "pack, neurons": (StatePack(target="mlp"),),
    "pack, keys": (StatePack(target="kv", min_ctx=0, recent=8, keys=16, check=9),),
    "pack, ternary": (StatePack(target="both", on="ternary", min_ctx=0, recent=8, keys=16, check=0),),
    "event": (SHORT,),
    "event, deltas": (Event(deltas="all", hold=1, topk=0.5),),
    "event, given again": (replace(SHORT, delta_theta=0.5, stale_beta=0.95, stale_lambda=0.01),),
    "mix": (Mix(),),
    "mix, one place": (Mix(where=(Override(frozenset({1}), frozenset({"up"}), {"on": "off"}),)),),
    "kwta and event": (KWTA(k=0.6), SHORT),
    "mix and kwta": (Mix(), KWTA(k=0.6, gate="off")),
    "pack and event": (StatePack(target="mlp"), Event(hold=1, topk=0.5)),
}
WHO = {"all": (False,), "some dense": (False, True, True), "one": (True, True, False, True)}
every_mode = pytest.mark.parametrize("name", MODES)
every_who = pytest.mark.parametrize("who", WHO)


def some(who: str, count: int) -> list[bool]:
    """Which of so many texts are dense."""
    return [WHO[who][i % len(WHO[who])] for i in range(count)]


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose silent neurons are read row by row by some modes."""
    return write_hf(tmp_path_factory.mktemp("texts") / "relu", "llama", **SIZES | {"hidden_act": "relu"})


@every_who
@every_mode
def test_every_mode(relu: Path, name: str, who: str) -> None:
    model, dense = opened(relu, *MODES[name]).model, some(who, 7)
    found = assert_as_alone(model, begun(model, LENGTHS[:7]), dense, rounds=6)
    plain = model.steps(TOKENS[:7], begun(model, LENGTHS[:7]), [True] * 7)
    same = [np.array_equal(a, b) for a, b in zip(found[0], plain, strict=True)]
    assert [s for s, d in zip(same, dense, strict=True) if d] == [True] * sum(dense)
    if name.startswith(("kwta", "mix")):  # the others' first token may be dense
        assert not any(s for s, d in zip(same, dense, strict=True) if not d)


@every_mode
def test_every_mode_at_every_level(relu: Path, level: str, name: str) -> None:
    model = opened(relu, *MODES[name], quant="int4", kv="int8").model
    assert_as_alone(model, begun(model, LENGTHS[5:14], "int8"), some("some dense", 9))


@every_who
@pytest.mark.parametrize("quant", QUANTS)
def test_other_weights_at_every_precision(directory: Path, threads: int, quant: str, who: str) -> None:
    model = opened(directory, Mix(), quant=quant).model
    assert_as_alone(model, begun(model, LENGTHS[:9]), some(who, 9), rounds=1)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mode]:
    model = write_model(tmp_path_factory.mktemp("texts") / "seeds")
    return model, using_seeds(pack(model, model.with_name("seeds-pack")))


@pytest.fixture(scope="module")
def factors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mode]:
    model = write_model(tmp_path_factory.mktemp("texts") / "factors")
    return model, using_factors(write_pack(model, model.with_name("factors-pack")))


@every_who
@pytest.mark.parametrize("kind", ["seeds", "factors"])
@pytest.mark.parametrize("beside", [(), (StatePack(target="kv", min_ctx=0, recent=8, keys=16),), (KWTA(k=0.6),)])
def test_rebuilt_weights(
    request: pytest.FixtureRequest, level: str, kind: str, who: str, beside: tuple[Mode, ...]
) -> None:
    folder, mode = request.getfixturevalue(kind)
    model = opened(folder, mode, *beside).model
    assert_as_alone(model, begun(model, LENGTHS[:9]), some(who, 9), rounds=2)


def test_rebuilt_weights_are_read_once_for_a_few_texts(seeds: tuple[Path, Mode], factors: tuple[Path, Mode]) -> None:
    """All of them with the mode, and a dense one among them, beside which they are read once more."""
    for folder, mode in (seeds, factors):
        model = opened(folder, mode).model
        read = []
        for count, dense in ((1, [False]), (FEW, [False] * FEW), (2, [True, False]), (1, [True])):
            texts = begun(model, [3] * count)
            before = model.bytes_read
            model.steps([5] * count, texts, dense)
            cache = count * model.cfg.n_layers * model.cfg.n_kv_heads * 4 * 2 * 2 * model.cfg.head_dim
            read.append(model.bytes_read - before - cache)
        one, few, both, plain = read
        head = model.weights.head.nbytes
        assert few == one < plain and both == one + plain - head


# ---------------------------------------------------------------- results that are not finite


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_text_that_is_not_finite_touches_no_other(tmp_path: Path, level: str, quant: str, value: float) -> None:
    """One token's embedding is damaged; texts without it go on as alone."""
    folder = write_hf(tmp_path, "llama", dtype="f32", **SIZES)
    lm, bad = opened(folder, quant=quant), 1  # in none of TOKENS
    table = np.array(lm.model.weights.embed.table)
    table[bad, 3] = value
    weights = replace(lm.model.weights, embed=replace(lm.model.weights.embed, table=table))
    model = Model(lm.model.cfg, weights)
    texts = begun(model, LENGTHS[4:13])
    copies = [text.clone() for text in texts]
    for at in (1, 4, 8):
        tokens = [5 + i for i in range(9)]
        tokens[at] = bad
        found = model.steps(tokens, texts, [False] * 9)
        for i, (token, copy) in enumerate(zip(tokens, copies, strict=True)):
            assert np.array_equal(model.step(token, copy), found[i], equal_nan=True)
            assert np.isfinite(found[i]).all() == (i not in {1, 4, 8} or i > at)


@pytest.mark.parametrize("place", ["qkv", "o", "up", "down"])
def test_a_planted_nan_is_caught_for_its_text_alone(directory: Path, place: str) -> None:
    lm = opened(directory, KWTA(k=0.8, gate="off"))
    texts = begun(lm.model, LENGTHS[:5])
    copies = [text.clone() for text in texts]
    want = lm.model.steps(TOKENS[:5], copies, [False] * 5)
    lm.model.slots[1].taken[place].slot.plant = True
    found = lm.model.steps(TOKENS[:5], texts, [False] * 5)
    assert np.isfinite(found).all() and lm.guard.nonfinite == 1
    assert not np.array_equal(found[0], want[0]) and np.array_equal(found[1:], want[1:])


@pytest.mark.parametrize("place", PLACES)
def test_other_weights_that_are_not_finite(directory: Path, place: str) -> None:
    """Every text falls back to the model's own, and each is counted as if alone."""
    lm = opened(directory, Mix())
    bad = damage(lm, 1, place, NAN)
    assert np.isfinite(assert_as_alone(lm.model, begun(lm.model, LENGTHS[:5]), rounds=1)).all()
    assert bad.nonfinite == 4 * 5  # alone and together, and twice in the end
    rows = begun(lm.model, LENGTHS[:3])
    before = bad.nonfinite
    assert_as_alone(lm.model, rows, [False, True, False], rounds=1)
    assert bad.nonfinite - before == 2 * 2 + 2 * 2


# ---------------------------------------------------------------- a time budget


def test_under_a_time_budget_each_token_has_its_own(directory: Path) -> None:
    lm = opened(directory, Event(budget_ms=1e4, keys=16, min_ctx=0, hold=8))
    texts, pace = begun(lm.model, [200, 5, 30]), lm.model.pace
    assert pace is not None
    for n in range(20):
        scores = lm.model.steps(TOKENS[n : n + 3], texts, [False, True, False])
        assert scores.shape == (3, 97) and np.isfinite(scores).all()
    assert [len(text) for text in texts] == [220, 25, 50]
    assert len(pace.schedule) == len(pace.times) == 40  # the dense text has no budget
    dense = [text.clone() for text in texts]
    assert_as_alone(lm.model, dense, [True] * 3)
    assert len(pace.schedule) == 40
