"""Known beginnings: which are found, how much of them is used, what is forgotten, and that copies are copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_hf

import ralo
from ralo import KWTA
from ralo.lm import LM
from ralo.model import FEW, STRETCH
from ralo.prefixes import LEAST, Prefixes
from ralo.sequence import Sequence

TOKENS = np.random.default_rng(7).integers(2, 97, 700).tolist()
OTHER = [98 - token for token in TOKENS]  # differs from the first token on
ROOM = 1 << 30


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LM:
    return ralo.load(write_hf(tmp_path_factory.mktemp("prefixes"), "llama", max_position_embeddings=1024), "int8")


def ran(lm: LM, tokens: list[int], prompt: int | None = None) -> Sequence:
    """A text whose first tokens, as many as `prompt`, ran as one and the others one by one."""
    seq = lm.new_sequence()
    lm.model.prefill(tokens[:prompt], seq)
    for token in tokens[len(seq) :]:
        lm.model.step(token, seq)
    return seq


def kept(lm: LM, tokens: list[int], prompt: int | None = None, dense: bool = False) -> Prefixes:
    prefixes = Prefixes(ROOM)
    prefixes.keep(ran(lm, tokens, prompt), len(tokens) if prompt is None else prompt, dense)
    return prefixes


def found(prefixes: Prefixes, prompt: list[int], dense: bool = False) -> tuple[int, int]:
    """Tokens that need not run again, and how many of the prompt's will be as alone."""
    result = prefixes.find(prompt, dense)
    if result is None:
        return 0, len(prompt)
    seq, sure = result
    assert seq.tokens == list(prompt[: len(seq)]) and 0 < len(seq) < len(prompt)
    return len(seq), sure


@pytest.mark.parametrize(
    ("shared", "used"),
    [(0, 0), (STRETCH - 1, 0), (STRETCH, STRETCH), (STRETCH + 1, STRETCH), (2 * STRETCH, 2 * STRETCH), (300, 256)],
)
def test_within_a_prompt_it_is_taken_up_at_a_multiple(lm: LM, shared: int, used: int) -> None:
    prompt = TOKENS[:shared] + OTHER[shared:400]
    assert found(kept(lm, TOKENS[:300]), prompt) == (used, 400)


@pytest.mark.parametrize("more", [1, 2, FEW, FEW + 1, FEW + 2])
def test_the_last_few_tokens_of_a_prompt_run_and_not_alone(lm: LM, more: int) -> None:
    """A prompt's bits are those of more than a few tokens at once."""
    length = 2 * STRETCH + more
    used, sure = found(kept(lm, TOKENS[:400]), TOKENS[:length])
    assert (used, sure) == (2 * STRETCH if more > FEW else STRETCH, length)


@pytest.mark.parametrize("answer", [1, 5, 40])
def test_with_an_answer_in_it_it_is_taken_up_whole(lm: LM, answer: int) -> None:
    prefixes = kept(lm, TOKENS[: 50 + answer], prompt=50)
    assert found(prefixes, TOKENS[:200]) == (50 + answer, 50)
    part = TOKENS[:51] + OTHER[51:200]  # only a part of the answer
    assert found(prefixes, part) == (51, 50)
    assert found(prefixes, TOKENS[:50] + OTHER[50:200]) == (0, 200)  # nothing of it


def test_never_all_of_a_prompt(lm: LM) -> None:
    prefixes = kept(lm, TOKENS[:90], prompt=50)
    for length in (52, 60, 89, 90):
        assert found(prefixes, TOKENS[:length]) == (length - 1, 50)
    assert found(prefixes, TOKENS[:91]) == (90, 50)
    prompt = kept(lm, TOKENS[:STRETCH])
    assert found(prompt, TOKENS[:STRETCH]) == (0, STRETCH)


def test_the_longest_is_found(lm: LM) -> None:
    prefixes = Prefixes(ROOM)
    for length in (140, 600, 270):
        tokens = TOKENS[:length] + OTHER[length : length + 3]  # none continues another
        prefixes.keep(ran(lm, tokens), len(tokens), False)
    assert found(prefixes, TOKENS) == (512, 700)
    assert found(prefixes, TOKENS[:400] + OTHER[400:500]) == (384, 500)
    assert found(prefixes, OTHER) == (0, 700)


def test_what_is_hardly_shared_is_not_copied(lm: LM) -> None:
    prefixes = kept(lm, TOKENS[: LEAST + 5], prompt=3)
    assert found(prefixes, TOKENS[: LEAST - 1] + OTHER[LEAST - 1 : 100]) == (0, 100)
    assert found(prefixes, TOKENS[:LEAST] + OTHER[LEAST:100]) == (LEAST, 3)
    prefixes.keep(ran(lm, OTHER[: LEAST - 1], prompt=3), 3, False)
    assert found(prefixes, OTHER[:100]) == (0, 100)


@pytest.mark.parametrize("dense", [False, True])
def test_dense_texts_and_others_are_kept_apart(lm: LM, dense: bool) -> None:
    prefixes = kept(lm, TOKENS[:300], dense=dense)
    assert found(prefixes, TOKENS[:400], dense) == (256, 400)
    assert found(prefixes, TOKENS[:400], not dense) == (0, 400)
    prefixes.keep(ran(lm, TOKENS[:350]), 350, not dense)  # continues the other, and does not replace it
    assert found(prefixes, TOKENS[:340], dense) == found(prefixes, TOKENS[:340], not dense) == (256, 340)
    assert len(prefixes._kept) == 2


def test_a_text_that_continues_another_replaces_it(lm: LM) -> None:
    prefixes = kept(lm, TOKENS[:150])
    alone = prefixes.nbytes
    prefixes.keep(ran(lm, OTHER[:150]), 150, False)
    assert prefixes.nbytes == 2 * alone
    longer = ran(lm, TOKENS[:300])
    prefixes.keep(longer, 300, False)
    assert prefixes.nbytes == alone + longer.nbytes and len(prefixes._kept) == 2
    prefixes.keep(ran(lm, TOKENS[:300]), 300, False)  # the same again
    assert len(prefixes._kept) == 2
    assert found(prefixes, TOKENS) == (256, 700) and found(prefixes, OTHER) == (128, 700)


def texts(lm: LM, count: int) -> list[list[int]]:
    """As many that share nothing, of one size in bytes."""
    return [[2 + i, *TOKENS[:200]] for i in range(count)]


def test_the_oldest_go_when_there_is_no_room(lm: LM) -> None:
    size = ran(lm, texts(lm, 1)[0]).nbytes
    prefixes, some = Prefixes(3 * size + size // 2), texts(lm, 5)
    for n, tokens in enumerate(some):
        prefixes.keep(ran(lm, tokens), len(tokens), False)
        assert prefixes.nbytes == min(n + 1, 3) * size <= prefixes.room
    assert [found(prefixes, [*tokens, *OTHER])[0] for tokens in some] == [0, 0, 128, 128, 128]


def test_what_is_found_is_new_again(lm: LM) -> None:
    size, some = ran(lm, texts(lm, 1)[0]).nbytes, texts(lm, 4)
    prefixes = Prefixes(3 * size)
    for tokens in some[:3]:
        prefixes.keep(ran(lm, tokens), len(tokens), False)
    assert found(prefixes, [*some[0], *OTHER])[0] == 128
    prefixes.keep(ran(lm, some[3]), len(some[3]), False)
    assert [found(prefixes, [*tokens, *OTHER])[0] for tokens in some] == [128, 0, 128, 128]


def test_a_text_larger_than_the_room_is_not_kept_and_drives_out_nothing(lm: LM) -> None:
    small = ran(lm, TOKENS[:200])
    prefixes = Prefixes(small.nbytes)
    prefixes.keep(small, 200, False)
    prefixes.keep(ran(lm, OTHER[:600]), 600, False)
    assert found(prefixes, TOKENS[:300]) == (128, 300) and found(prefixes, OTHER) == (0, 700)
    assert found(Prefixes(0), TOKENS) == (0, 700)


@pytest.mark.parametrize("modes", [(), (KWTA(k=0.5, duty=4),)], ids=["dense", "kwta"])
def test_a_copy_is_independent(tmp_path: Path, modes: tuple[KWTA, ...]) -> None:
    lm = ralo.load(write_hf(tmp_path, "llama", max_position_embeddings=512), "int8", modes=modes)
    prefixes, ask = kept(lm, TOKENS[:190], prompt=150), TOKENS[:180] + OTHER[180:300]
    scores = []
    for _ in range(3):
        result = prefixes.find(ask, False)
        assert result is not None
        seq, _ = result
        scores.append(lm.model.prefill(ask[len(seq) :], seq))
        for token in OTHER[:20]:
            lm.model.step(token, seq)
    assert np.array_equal(scores[0], scores[1]) and np.array_equal(scores[0], scores[2])
    assert prefixes._kept[0].seq.tokens == TOKENS[:190] and len(prefixes._kept) == 1


@pytest.mark.parametrize("length", [128 + FEW + 1, 256, 257, 265, 400])
def test_the_rest_gives_the_bits_of_the_whole(lm: LM, level: str, length: int) -> None:
    prompt = TOKENS[:128] + OTHER[128:length]
    result = kept(lm, TOKENS[:200], prompt=150).find(prompt, False)
    assert result is not None
    seq, sure = result
    assert (len(seq), sure) == (128, length)
    whole = lm.new_sequence()
    assert np.array_equal(lm.model.prefill(prompt[128:], seq), lm.model.prefill(prompt, whole))
    assert np.array_equal(lm.model.step(5, seq), lm.model.step(5, whole))


words = st.lists(st.integers(2, 3), min_size=1, max_size=40)


@given(first=words, answer=words, prompt=words, dense=st.tuples(st.booleans(), st.booleans()))
@settings(max_examples=60, deadline=None)
def test_what_is_found_is_always_a_true_beginning(
    lm: LM, first: list[int], answer: list[int], prompt: list[int], dense: tuple[bool, bool]
) -> None:
    seq = lm.new_sequence()
    lm.model.forward(first + answer, seq)
    prefixes = Prefixes(ROOM)
    prefixes.keep(seq, len(first), dense[0])
    used, sure = found(prefixes, prompt, dense[1])
    same = next((i for i, (a, b) in enumerate(zip(first + answer, prompt, strict=False)) if a != b), len(prompt))
    same = min(same, len(first + answer), len(prompt) - 1)
    in_answer = same > len(first) and same >= LEAST and dense[0] == dense[1]
    assert (used, sure) == ((same, len(first)) if in_answer else (0, len(prompt)))
