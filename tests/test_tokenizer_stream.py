"""Streaming: whole characters, spaces where decode has them, and the same cost for every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import SPACE, bpe_metadata, needs_shared, open_shared, write_directory
from tiny_tokens import make_bpe

from ralo.tokenizer import Tokenizer, from_directory, from_gguf

every_kind = pytest.mark.parametrize("kind", ["llama-spm", "gpt-2", "mini"])
any_text = st.text(max_size=60).filter(lambda text: SPACE not in text and "<" not in text)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], after: Sequence[int] = ()) -> list[str]:
    stream = tokenizer.stream(after)
    return [*(stream.feed(token_id) for token_id in ids), stream.flush()]


@every_kind
@needs_shared
@given(text=any_text)
@settings(max_examples=60, deadline=None)
def test_stream_is_decode(kind: str, text: str) -> None:
    parts = pieces(open_shared(kind), open_shared(kind).encode(text))
    assert "".join(parts) == text
    assert "\ufffd" in text or "\ufffd" not in "".join(parts)


@every_kind
@needs_shared
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_stream_of_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = open_shared(kind)
    ids = data.draw(st.lists(st.integers(0, 600) | st.integers(0, tokenizer.vocab_size + 10), max_size=40))
    whole = tokenizer.decode(ids)
    parts = "".join(pieces(tokenizer, ids))
    assert parts == whole or "\ufffd" in whole


@needs_shared
def test_stream_holds_byte_tokens_until_the_character_is_whole() -> None:
    llama = open_shared("llama-spm")
    animal, letter = ([3 + byte for byte in character.encode()] for character in "🦙語")
    assert llama.encode("🦙", special=False)[1:] == animal
    assert pieces(llama, animal) == ["", "", "", "🦙", ""]
    assert pieces(llama, [*animal, *letter, 15043]) == ["", "", "", "🦙", "", "", "語", " Hello", ""]


@needs_shared
def test_stream_holds_parts_of_characters() -> None:
    gpt2 = open_shared("gpt-2")
    ids = gpt2.encode("a🦙b")
    assert len(ids) > 3
    parts = pieces(gpt2, ids)
    assert parts[0] == "a" and parts[-2:] == ["b", ""]
    assert sorted(parts[1:-2]) == [""] * (len(ids) - 3) + ["🦙"]


def test_stream_shows_the_whole_characters_of_a_token_at_once() -> None:
    tokens, _ = make_bpe(300)
    tokenizer = from_gguf(bpe_metadata(tokens=[*tokens, "catÃ"], token_type=None), Path("tiny.gguf"))
    rest = tokens.index("©")
    assert pieces(tokenizer, [len(tokens), rest]) == ["cat", "é", ""]


def test_stream_of_tokens_that_all_end_within_a_character() -> None:
    tokens, _ = make_bpe(300)
    first, second, third = "ä½ł"  # the bytes of 你 as the vocabulary spells them
    tokenizer = from_gguf(bpe_metadata(tokens=[*tokens, third + first + second], token_type=None), Path("tiny.gguf"))
    ids = [tokens.index(first), tokens.index(second), *[len(tokens)] * 500, tokens.index(third)]
    assert pieces(tokenizer, ids) == ["", "", *["你"] * 500, "你", ""]


def test_stream_of_words_without_a_decoder(tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"one": 0, "two": 1, "<unk>": 2}, "unk_token": "<unk>"}
    tokenizer = from_directory(
        write_directory(tmp_path, {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": words})
    )
    assert pieces(tokenizer, [0, 1, 2, 0]) == ["one", " two", " <unk>", " one", ""]


@needs_shared
@pytest.mark.parametrize("kind", ["llama-spm", "gpt-2"])
def test_stream_ends_in_the_middle_of_a_character(kind: str) -> None:
    tokenizer = open_shared(kind)
    ids = tokenizer.encode("ok 🦙", special=False)[:-1]
    parts = pieces(tokenizer, ids)
    assert "\ufffd" not in "".join(parts[:-1]) and "\ufffd" in parts[-1]
    assert "".join(parts) == tokenizer.decode(ids)


@needs_shared
def test_stream_keeps_spaces_around_special_tokens() -> None:
    llama = open_shared("llama-spm")
    hello, space = 15043, 29871
    for ids in ([1, hello, 2, hello], [2, 2, hello, 1, 1, hello], [space, hello], [hello, space, space, hello]):
        assert "".join(pieces(llama, ids)) == llama.decode(ids)


@needs_shared
def test_stream_that_continues_a_text() -> None:
    llama = open_shared("llama-spm")
    prompt, hello = llama.encode("Say"), 15043
    assert "".join(pieces(llama, [hello])) == "Hello"
    assert "".join(pieces(llama, [hello], after=prompt)) == " Hello"
    assert "".join(pieces(llama, [hello], after=[3 + byte for byte in "🦙".encode()])) == " Hello"


@needs_shared
def test_stream_does_not_wait_for_ever() -> None:
    llama = open_shared("llama-spm")
    parts = pieces(llama, [15043, *[3 + 0xFF] * 100, 15043])
    assert parts[0] == "Hello" and parts[-2].endswith(" Hello")
    assert sum(map(bool, parts)) > 8


@every_kind
@needs_shared
def test_stream_costs_the_same_for_every_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = open_shared(kind)
    ids = tokenizer.encode("🦙 语言 and words\n" * 200, special=False)
    decode, lengths = tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda some: (lengths.append(len(some)), decode(some))[1])
    assert "".join(pieces(tokenizer, ids)) == decode(ids)
    assert max(lengths) <= 40 and len(lengths) <= 2 * len(ids) + 4
