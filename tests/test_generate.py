"""The loop that makes text: when it stops, what it holds back, and that its counters add up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import write_hf

import ralo
from ralo import RaloError, Sampling
from ralo.generate import Piece, Request, Turn, generate
from ralo.model import Model
from ralo.sampling import Sampler
from ralo.sequence import Sequence

F32 = NDArray[np.float32]
GREEDY = Sampling(temperature=0)
PREFILL_BYTES, STEP_BYTES = 1000, 7


class Script:
    """In place of a model: its likeliest token is always the next of a list. Counts a few bytes for each pass."""

    def __init__(self, says: list[int], context: int = 64) -> None:
        self.says, self.said, self.bytes_read = says, 0, 0
        self.cfg: Any = SimpleNamespace(max_context=context, n_layers=0)
        self.prefilled: list[list[int]] = []
        self.times: list[float] = []

    def prefill(self, tokens: list[int], seq: Sequence) -> F32:
        self.prefilled.append(list(tokens))
        self.bytes_read += PREFILL_BYTES
        seq.tokens.extend(tokens)
        return self._scores()

    def step(self, token: int, seq: Sequence) -> F32:
        assert len(seq) < self.cfg.max_context
        self.bytes_read += STEP_BYTES
        seq.tokens.append(token)
        self.said += 1
        return self._scores()

    def took(self, seconds: float) -> None:
        self.times.append(seconds)

    def _scores(self) -> F32:
        return np.eye(50, dtype=np.float32)[self.says[self.said % len(self.says)]]


class Words:
    """In place of a tokenizer's stream: a word for each token, the last one unfinished until the flush."""

    def __init__(self, words: list[str], rest: str = "") -> None:
        self.words, self.rest = words, rest

    def feed(self, token: int) -> str:
        return self.words[token]

    def flush(self) -> str:
        return self.rest


def run(model: Any, request: Request, words: Words | None = None) -> tuple[list[Piece], Sequence]:
    seq = Sequence.empty(model.cfg)
    return list(generate(model, seq, request, words)), seq


def request(prompt: list[int] | None = None, max_tokens: int = 20, **options: Any) -> Request:
    return Request([1, 2, 3] if prompt is None else prompt, Sampler(GREEDY), max_tokens, **options)


def test_tokens_text_and_counters() -> None:
    model, ask = Script([4, 5, 6]), request(max_tokens=5)
    pieces, seq = run(model, ask, Words([""] * 4 + ["a", "b", "c"]))
    assert pieces == [Piece(t, w) for t, w in zip([4, 5, 6, 4, 5], "abcab", strict=True)]
    assert seq.tokens == [1, 2, 3, 4, 5, 6, 4]  # the last token has not been run: nobody asked what follows it
    s = ask.stats
    assert (s.finish, s.prompt_tokens, s.new_tokens, s.steps) == ("length", 3, 5, 4)
    assert (s.prefill_bytes, s.decode_bytes, s.bytes_per_token) == (PREFILL_BYTES, 4 * STEP_BYTES, STEP_BYTES)
    assert s.prefill_tok_s == 3 / s.prefill_s > 0 and s.decode_tok_s == 4 / s.decode_s > 0
    assert s.times == model.times and len(s.times) == 4 and sum(s.times) == pytest.approx(s.decode_s)
    assert 1e3 * min(s.times) <= s.p99_ms <= 1e3 * max(s.times)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_no_tokens_and_one(max_tokens: int) -> None:
    ask = request(max_tokens=max_tokens)
    pieces, seq = run(Script([4]), ask)
    assert [piece.token for piece in pieces] == [4] * max_tokens and len(seq) == 3
    s = ask.stats
    assert (s.finish, s.new_tokens, s.steps, s.decode_bytes, s.decode_tok_s) == ("length", max_tokens, 0, 0, 0.0)


def test_end_of_text() -> None:
    ask = request(stop_ids=frozenset({9, 8}))
    pieces, seq = run(Script([4, 5, 9, 6]), ask, Words([""] * 4 + ["a", "b"], rest="?"))
    assert pieces == [Piece(4, "a"), Piece(5, "b"), Piece(-1, "?")]
    assert (ask.stats.finish, ask.stats.new_tokens, ask.stats.steps) == ("eos", 2, 2) and 9 not in seq.tokens


@pytest.mark.parametrize(
    ("words", "stop", "pieces"),
    [
        (["Hi", "\n", "Us", "er:", "x"], ["\nUser:"], ["Hi", "", "", ""]),
        (["Hi", "\n", "Us", "ing", "x"], ["\nUser:"], ["Hi", "", "", "\nUsing", "x"]),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", ""]),
        (["one END two"], ["END"], ["one "]),
        (["END", "x"], ["END"], [""]),
        (["a b", " c"], ["c", " b"], ["a"]),
        (["ab", "c"], ["abcd", "b"], ["a"]),
        (["x", "<", "/s"], ["</s>"], ["x", "", "", "</s"]),
        (["a", "b"], [""], ["a", "b"]),
        (["a", "", "b"], ["ab"], ["", "", ""]),
    ],
)
def test_stop_strings(words: list[str], stop: list[str], pieces: list[str]) -> None:
    ask = request(stop=stop, max_tokens=len(words))
    found, _ = run(Script(list(range(len(words)))), ask, Words(words))
    assert [piece.text for piece in found] == pieces
    text, all_text = "".join(pieces), "".join(words)
    assert ask.stats.finish == ("length" if text == all_text else "stop")
    assert ask.stats.new_tokens == sum(piece.token >= 0 for piece in found)


@pytest.mark.parametrize("seed", range(60))
def test_stop_strings_at_random(seed: int) -> None:
    """Against looking for them in the whole text so far after every token."""
    random = np.random.default_rng(seed)
    words = ["".join(random.choice(list("ab"), random.integers(0, 4))) for _ in range(12)]
    stop = ["".join(random.choice(list("ab"), random.integers(1, 5))) for _ in range(random.integers(1, 4))]
    ask = request(stop=stop, max_tokens=len(words))
    found, _ = run(Script(list(range(len(words)))), ask, Words(words))
    want = "".join(words)
    for count in range(1, len(words) + 1):
        whole = "".join(words[:count])
        cuts = [whole.find(s) for s in stop if s in whole]
        if cuts:
            want = whole[: min(cuts)]
            break
        shown = "".join(piece.text for piece in found[:count])
        assert whole.startswith(shown) and len(whole) - len(shown) < max(map(len, stop))
    assert "".join(piece.text for piece in found) == want


def test_full_context_stops() -> None:
    ask = request(on_full="stop")
    pieces, seq = run(Script([4, 5], context=6), ask, Words([""] * 4 + ["a", "b"], rest="."))
    assert [piece.token for piece in pieces] == [4, 5, 4, 5, -1] and len(seq) == 6
    assert (ask.stats.finish, ask.stats.new_tokens, ask.stats.steps) == ("context", 4, 3)


def test_full_context_is_an_error_where_asked() -> None:
    ask = request(on_full="error")
    with pytest.raises(RaloError, match="context of 6 tokens is full"):
        run(Script([4], context=6), ask)
    assert ask.stats.new_tokens == 4


def test_full_context_slides_and_says_what_it_cost() -> None:
    model, ask = Script([4, 5, 6, 7], context=6), request(on_full="slide", max_tokens=9)
    pieces, seq = run(model, ask)
    tokens = [piece.token for piece in pieces]
    assert tokens == [4, 5, 6, 7, 4, 5, 6, 7, 4] and ask.stats.finish == "length"
    assert model.prefilled == [[1, 2, 3], [4, 5, 6], [7, 4, 5]]
    assert seq.tokens == [7, 4, 5, 6, 7] and ask.stats.steps == 8
    assert ask.stats.decode_bytes == 8 * STEP_BYTES + 2 * PREFILL_BYTES == model.bytes_read - ask.stats.prefill_bytes


def test_context_of_one_slides_too() -> None:
    pieces, seq = run(Script([4, 5], context=1), request([1], max_tokens=4, on_full="slide"))
    assert [piece.token for piece in pieces] == [4, 5, 4, 5] and seq.tokens == [4]


def test_prompts_that_cannot_be_run() -> None:
    with pytest.raises(RaloError, match="the prompt is empty"):
        run(Script([4]), request([]))
    with pytest.raises(RaloError, match="the prompt is 7 tokens, the model's context is 6"):
        run(Script([4], context=6), request([1] * 7))
    model, seq = Script([4], context=6), Sequence.empty(SimpleNamespace(n_layers=0))  # type: ignore[arg-type]
    seq.tokens.extend([1] * 5)
    with pytest.raises(RaloError, match="the prompt is 7 tokens"):
        list(generate(model, seq, request([1, 2])))  # type: ignore[arg-type]
    assert not model.prefilled
    pieces, _ = run(Script([4], context=6), request([1] * 6))
    assert len(pieces) == 1  # what follows a full context is known still


def test_penalties_see_prompt_and_answer() -> None:
    """The script always prefers its token by 1, so that a penalty of 2 sends the choice elsewhere."""
    ask = Request([4], Sampler(Sampling(temperature=0, presence_penalty=2.0)), 3)
    pieces, _ = run(Script([4, 5, 5]), ask)
    assert [piece.token for piece in pieces] == [0, 5, 1]


# ---------------------------------------------------------------- one text between two passes


def turn(ask: Request, words: Words | None = None, tokens: list[int] | None = None) -> Turn:
    seq = Sequence.empty(SimpleNamespace(n_layers=0))  # type: ignore[arg-type]
    seq.tokens.extend(ask.prompt if tokens is None else tokens)
    return Turn(seq, ask, words)


def test_a_turn_takes_tokens_until_it_is_done() -> None:
    ask = request(max_tokens=3)
    one = turn(ask, Words(["a", "b", "c"], rest="."))
    assert not one.done and one.stats is ask.stats
    assert [one.take(t) for t in (0, 1)] == [Piece(0, "a"), Piece(1, "b")]
    assert not one.done and ask.stats.finish == "" and ask.stats.new_tokens == 2
    assert one.take(2) == Piece(2, "c") and one.done and ask.stats.finish == "length"
    assert one.rest() == "." and ask.stats.new_tokens == 3
    assert one.seq.tokens == [1, 2, 3]  # running them is somebody else's work


def test_a_turn_of_no_tokens_is_done_at_once() -> None:
    ask = request(max_tokens=0)
    assert turn(ask).done and ask.stats.finish == "length" and ask.stats.new_tokens == 0


def test_a_turn_ends_with_a_stop_token_which_is_no_text() -> None:
    ask = request(max_tokens=1, stop_ids=frozenset({7}))
    one = turn(ask, Words([""] * 8, rest="?"))
    assert one.take(7) is None and one.done and one.rest() == "?"
    assert (ask.stats.finish, ask.stats.new_tokens) == ("eos", 0)


def test_a_turn_ends_with_a_stop_string_and_the_rest_is_not_shown() -> None:
    """Also where it is the last token that it may have."""
    for most in (2, 9):
        ask = request(max_tokens=most, stop=["bc"])
        one = turn(ask, Words(["ab", "cd"], rest="never"))
        assert one.take(0) == Piece(0, "a") and not one.done
        assert one.take(1) == Piece(1, "") and one.done
        assert (ask.stats.finish, ask.stats.new_tokens, one.rest()) == ("stop", 2, "")


def test_a_turn_shows_what_was_held_back_in_vain() -> None:
    one = turn(request(max_tokens=2, stop=["cdx"]), Words(["ab", "cd"], rest="!"))
    assert [one.take(0), one.take(1)] == [Piece(0, "ab"), Piece(1, "")] and one.rest() == "cd!"


def test_a_turn_chooses_by_what_the_text_has_so_far() -> None:
    ask = Request([4], Sampler(Sampling(temperature=0, presence_penalty=2.0)), 3)
    one = turn(ask, tokens=[4, 5])
    assert one.choose(np.eye(8, dtype=np.float32)[4]) == 0  # 4 and 5 are in it
    one.seq.tokens.append(0)
    assert one.choose(np.eye(8, dtype=np.float32)[4]) == 1
    assert ask.stats.new_tokens == 0 and not one.done


def test_a_turn_without_words() -> None:
    one = turn(request(max_tokens=1))
    assert one.take(3) == Piece(3, "") and one.done and one.rest() == ""


@pytest.mark.parametrize("seed", range(20))
def test_turns_driven_by_hand_are_generate(seed: int) -> None:
    random = np.random.default_rng(seed)
    words = Words(["".join(random.choice(list("ab"), random.integers(0, 3))) for _ in range(8)], rest="b")
    says = random.integers(0, 8, 15).tolist()
    options = {"stop": ["abb", "baa"][: random.integers(0, 3)], "stop_ids": frozenset({int(random.integers(0, 12))})}
    ask, by_hand = (request(max_tokens=int(random.integers(0, 12)), **options) for _ in range(2))
    by_hand.max_tokens = ask.max_tokens
    want, _ = run(Script(says), ask, words)
    one, pieces, script = turn(by_hand, words), [], Script(says)
    while not one.done:
        if piece := one.take(one.choose(script._scores())):
            pieces.append(piece)
        script.said += 1
    text = "".join(piece.text for piece in pieces) + one.rest()
    assert text == "".join(piece.text for piece in want)
    assert [piece.token for piece in pieces] == [piece.token for piece in want if piece.token >= 0]
    assert (by_hand.stats.finish, by_hand.stats.new_tokens) == (ask.stats.finish, ask.stats.new_tokens)


def open_tiny(folder: Path, **config: Any) -> Model:
    return ralo.load(write_hf(folder, "llama", **config), quant="int8").model


def test_counters_are_those_of_the_kernels(tmp_path: Path) -> None:
    model, ask = open_tiny(tmp_path), request(max_tokens=30)
    cfg = model.cfg
    run(model, ask)
    weights = sum(m.data.nbytes + m.scales.nbytes for m in model.weights.matrices().values() if m.scales is not None)
    keys = sum(range(4, 4 + 29))  # of each step: the prompt's 3, itself, and those before
    cache = cfg.n_layers * cfg.n_kv_heads * keys * 2 * 2 * cfg.head_dim
    assert ask.stats.steps == 29 and ask.stats.decode_bytes == 29 * weights + cache
    assert model.bytes_read == ask.stats.prefill_bytes + ask.stats.decode_bytes


def test_sliding_goes_on_as_a_fresh_text(tmp_path: Path) -> None:
    model = open_tiny(tmp_path, max_position_embeddings=16)
    pieces, _ = run(model, request([5, 6, 7], max_tokens=18, on_full="slide"))
    tokens = [5, 6, 7] + [piece.token for piece in pieces]
    again, _ = run(model, request(tokens[8:17], max_tokens=4))
    assert [piece.token for piece in again] == tokens[17:21]


def test_damaged_weights_end_in_one_line(tmp_path: Path) -> None:
    model, ask = open_tiny(tmp_path), request()
    model.weights.final_norm.weight[3] = np.nan
    with pytest.raises(RaloError, match="its weights are damaged") as caught:
        run(model, ask)
    assert "\n" not in str(caught.value) and ask.stats.new_tokens == 0
