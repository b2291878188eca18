"""Tokenizers: llama.cpp's vectors, round trips, what directories and GGUF files say, saving."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import SPACE, TEXTS, VOCABS, bpe_metadata, needs_shared, open_shared, spm_metadata, write_directory
from tiny_tokens import make_bpe, make_spm, make_tokenizer

from ralo.errors import RaloError
from ralo.formats.gguf import read_metadata
from ralo.tokenizer import Tokenizer, bpe, from_directory, from_gguf

every_kind = pytest.mark.parametrize("kind", ["llama-spm", "gpt-2", "mini"])
any_text = st.text(max_size=60).filter(lambda text: SPACE not in text and "<" not in text)


# What ids a text has


@needs_shared
@pytest.mark.parametrize("name", ["llama-spm", "gpt-2"])
def test_vectors_of_llama_cpp(name: str) -> None:
    path = VOCABS / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        assert open_shared(name).encode(text, special=False) == [int(number) for number in line.split()], text


def reference_spm(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's BPE at its plainest: join the best-scored pair, the leftmost of equals, while there is one."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    pieces = {token: i for i, token in enumerate(tokens) if kinds[i] == 1}
    symbols = list(SPACE + text.replace(" ", SPACE)) if text else []
    while pairs := [i for i in range(len(symbols) - 1) if symbols[i] + symbols[i + 1] in pieces]:
        best = max(pairs, key=lambda i: (scores[pieces[symbols[i] + symbols[i + 1]]], -i))
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [pieces[symbol]] if symbol in pieces else [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return ids


@needs_shared
def test_spm_equals_the_plain_algorithm() -> None:
    metadata = read_metadata(VOCABS / "ggml-vocab-llama-spm.gguf")
    runs = [f"a{' ' * count}b" for count in range(1, 36)] + ["=" * 40, "-" * 33, "\n" * 9]
    for text in (*TEXTS, *runs, " ", ""):
        assert open_shared("llama-spm").encode(text, special=False) == reference_spm(metadata, text), text


@given(st.text(alphabet="the and is in on  .\n", max_size=40))
@settings(max_examples=60, deadline=None)
def test_tiny_spm_equals_the_plain_algorithm(text: str) -> None:
    metadata = spm_metadata()
    assert from_gguf(metadata, Path("tiny.gguf")).encode(text, special=False) == reference_spm(metadata, text)


def test_spm_token_that_holds_two_words() -> None:
    tokens, scores, kinds = make_spm(400)
    tokens[380:382], kinds[380:382] = ["a" + SPACE, f"a{SPACE}b"], [1, 1]
    metadata = spm_metadata(tokens=tokens, scores=scores, token_type=kinds, add_space_prefix=False)
    tokenizer = from_gguf(metadata, Path("tiny.gguf"))
    assert tokenizer.encode("a b", special=False) == [381]
    assert tokenizer.decode([381]) == "a b"


def test_spm_without_a_space_before_the_text() -> None:
    tokenizer = from_gguf(spm_metadata(add_space_prefix=False), Path("tiny.gguf"))
    ids = tokenizer.encode("the cat", special=False)
    assert tokenizer.piece(ids[0]) != SPACE and tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(tokenizer.encode(" the", special=False)) == " the"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234  x\n\ny", ["it", "'s", " 1234", " ", " x", "\n", "\n", "y"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("llama-bpe", "It'S 12345 (ok)\n\n  x", ["It", "'S", " ", "123", "45", " (", "ok", ")\n\n", " ", " x"]),
        ("qwen2", "a 123 $x", ["a", " ", "1", "2", "3", " $", "x"]),
        ("tekken", "helloWorld 12 a/b//\n", ["hello", "World", " ", "1", "2", " a", "/b", "//\n"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
        ("deepseek-v3", "x1234 日本語 ok.go", ["x", "123", "4", " ", "日本語", " ok", ".go"]),
        ("deepseek-coder", "a b1.\n", ["a", " b", "1", ".", "\n"]),
        ("falcon", "a,b 12345", ["a", ",", "b", " ", "123", "45"]),
        ("default", "a,b 12345", ["a", ",", "b", " ", "123", "45"]),
    ],
)
def test_words_before_merging(pre: str, text: str, words: list[str]) -> None:
    tokens, merges = make_bpe(300)
    pre_tokenizer = bpe.build(tokens, [tuple(merge.split(" ")) for merge in merges], bpe.PRES[pre]).pre_tokenizer
    spans = [span for _, span in pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == words


def test_composed_characters() -> None:
    qwen, llama = (from_gguf(bpe_metadata(400, pre=pre), Path("tiny.gguf")) for pre in ("qwen2", "llama-bpe"))
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")
    assert llama.encode("e\u0301") != llama.encode("\u00e9")


@every_kind
@needs_shared
@given(text=any_text)
@settings(max_examples=60, deadline=None)
def test_round_trip(kind: str, text: str) -> None:
    assert open_shared(kind).decode(open_shared(kind).encode(text)) == text


@every_kind
@needs_shared
def test_long_text(kind: str) -> None:
    text = "\n".join(TEXTS) * 1500
    assert open_shared(kind).decode(open_shared(kind).encode(text)) == text


@needs_shared
def test_attributes_of_the_vocabularies() -> None:
    llama, gpt2, mini = open_shared("llama-spm"), open_shared("gpt-2"), open_shared("mini")
    assert (llama.vocab_size, llama.bos_id, llama.eos_ids, llama.add_bos) == (32000, 1, {2}, True)
    assert (gpt2.vocab_size, gpt2.bos_id, gpt2.eos_ids, gpt2.add_bos) == (50257, 50256, {50256}, False)
    assert (mini.vocab_size, mini.bos_id, mini.eos_ids, mini.add_bos) == (8192, 0, {0}, False)
    assert llama.encode("Hello") == [1, 15043] and llama.encode("") == [1] and llama.encode("", special=False) == []


@needs_shared
def test_special_tokens_in_the_text() -> None:
    mini = open_shared("mini")
    ids = mini.encode("<|user|>hi<|assistant|>", special=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert mini.decode(ids) == "hi"
    assert open_shared("llama-spm").encode("</s>", special=False) == [2]


def test_text_that_is_not_unicode() -> None:
    tokenizer = from_gguf(bpe_metadata(), Path("tiny.gguf"))
    with pytest.raises(RaloError, match="UTF-8") as caught:
        tokenizer.encode("half \ud800 pair")
    assert "\n" not in str(caught.value)


# What a directory says


def test_ids_from_every_file(tmp_path: Path) -> None:
    folder = write_directory(
        tmp_path,
        tokenizer_config={"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"},
        special_tokens_map={"eos_token": {"content": "</s>"}},
        generation_config={"eos_token_id": [1, 5]},
        config={"bos_token_id": 3, "eos_token_id": 7, "vocab_size": 300},
    )
    tokenizer = from_directory(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {1, 5, 7})
    assert tokenizer.add_bos is False and not tokenizer.has_chat


def test_ids_from_the_config_alone(tmp_path: Path) -> None:
    tokenizer = from_directory(write_directory(tmp_path, config={"bos_token_id": 0, "eos_token_id": 50256}))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, frozenset())


def test_no_ids_at_all(tmp_path: Path) -> None:
    tokenizer = from_directory(write_directory(tmp_path, config={"eos_token_id": None}))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (None, frozenset(), 278)


def test_named_tokens_are_special(tmp_path: Path) -> None:
    tokenizer = from_directory(write_directory(tmp_path, tokenizer_config={"eos_token": "Ġthe"}))
    assert tokenizer.decode(tokenizer.encode("on the")) == "on"


def test_bos_comes_from_the_post_processor(tmp_path: Path) -> None:
    before = {
        "type": "TemplateProcessing",
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    before["single"] = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    folder = write_directory(
        tmp_path, make_tokenizer(300) | {"post_processor": before}, tokenizer_config={"bos_token": "<s>"}
    )
    tokenizer = from_directory(folder)
    assert tokenizer.add_bos
    assert tokenizer.encode("the") == [0, *tokenizer.encode("the", special=False)]


def test_settings_of_a_training_run_are_left_out(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(300)
    tokenizer["model"]["dropout"] = 1.0
    tokenizer["truncation"] = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    (tmp_path / "plain").mkdir()
    plain = from_directory(write_directory(tmp_path / "plain"))
    assert from_directory(write_directory(tmp_path, tokenizer)).encode("the rain in Spain") == plain.encode(
        "the rain in Spain"
    )


def test_chat_templates_of_a_directory(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert from_directory(write_directory(tmp_path, tokenizer_config={"chat_template": "S"})).chat_template == "S"
    assert from_directory(write_directory(tmp_path, tokenizer_config={"chat_template": named})).chat_template == "D"
    assert (
        from_directory(write_directory(tmp_path, tokenizer_config={"chat_template": named[:1]})).chat_template is None
    )
    (tmp_path / "chat_template.jinja").write_text("own file ü", encoding="utf-8")
    assert from_directory(tmp_path).chat_template == "own file ü"


# What a GGUF file says


def test_ids_of_a_gguf_file() -> None:
    tokens, _ = make_bpe(300)
    tokens[5:7] = ["<|im_end|>", "<|eot_id|>"]
    kinds = [3, 3, 1, 1, 1, 3, 1] + [1] * (len(tokens) - 7)
    metadata = bpe_metadata(tokens=tokens, token_type=kinds, merges=[], eot_token_id=np.uint32(9), chat_template="T")
    tokenizer = from_gguf(metadata, Path("tiny.gguf"))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (0, {1, 5, 9}, "T")
    assert tokenizer.add_bos  # as llama-bpe does where the file does not say


@pytest.mark.parametrize("metadata", [spm_metadata, bpe_metadata])
def test_added_tokens_of_a_gguf_file(metadata: Any) -> None:
    bare = from_gguf(metadata(add_bos_token=False), Path("tiny.gguf"))
    both = from_gguf(metadata(add_bos_token=True, add_eos_token=True), Path("tiny.gguf"))
    [eos] = both.eos_ids
    assert not bare.add_bos and both.add_bos
    assert both.encode("the") == [both.bos_id, *bare.encode("the"), eos]


def test_gguf_file_of_few_words() -> None:
    spm = from_gguf(spm_metadata(bos_token_id=None, eos_token_id=None), Path("tiny.gguf"))
    assert (spm.bos_id, spm.eos_ids, spm.add_bos) == (1, {2}, True)
    bare = from_gguf(bpe_metadata(pre=None, token_type=None, bos_token_id=None, eos_token_id=None), Path("tiny.gguf"))
    assert (bare.bos_id, bare.eos_ids, bare.add_bos) == (None, frozenset(), False)


def test_user_defined_and_empty_tokens() -> None:
    tokens, _ = make_bpe(300)
    kinds = [3, 3] + [1] * (len(tokens) - 2) + [4, 1, 1]
    tokenizer = from_gguf(bpe_metadata(tokens=[*tokens, "<tool call>", "", "x "], token_type=kinds), Path("tiny.gguf"))
    ids = tokenizer.encode("the<tool call>end", special=False)
    assert len(tokens) in ids and tokenizer.decode(ids) == "the<tool call>end"
    assert tokenizer.decode([*ids, len(tokens) + 1]) == "the<tool call>end"
    assert tokenizer.vocab_size == len(tokens) + 3


# Saving


def same(one: Tokenizer, other: Tokenizer) -> None:
    for name in ("vocab_size", "bos_id", "eos_ids", "add_bos", "chat_template", "has_chat"):
        assert getattr(one, name) == getattr(other, name), name
    for text in (*TEXTS, "<s></s><|user|>", ""):
        for special in (True, False):
            assert one.encode(text, special=special) == other.encode(text, special=special)
    assert one.decode(range(one.vocab_size)) == other.decode(range(one.vocab_size))


@every_kind
@needs_shared
def test_save_and_open(kind: str, tmp_path: Path) -> None:
    open_shared(kind).save(tmp_path / "new")
    same(from_directory(tmp_path / "new"), open_shared(kind))


def test_save_and_open_with_everything(tmp_path: Path) -> None:
    metadata = spm_metadata(eot_token_id=7, add_eos_token=True, add_space_prefix=False, chat_template="{{ bos_token }}")
    tokenizer = from_gguf(metadata, Path("tiny.gguf"))
    tokenizer.save(tmp_path)
    again = from_directory(tmp_path)
    same(again, tokenizer)
    assert again.eos_ids == {2, 7} and again.chat([]) == tokenizer.chat([]) == "<s>"


def test_save_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RaloError, match="cannot write"):
        from_gguf(bpe_metadata(), Path("tiny.gguf")).save(tmp_path / "file")


@every_kind
@needs_shared
@pytest.mark.filterwarnings("ignore")
def test_saved_tokenizers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers' own reading")
    ours = open_shared(kind)
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.bos_token_id == ours.bos_id and theirs.eos_token_id in ours.eos_ids
    for text in (*TEXTS, "a</s> b<|endoftext|>c"):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text, special=False)
        assert theirs.decode(theirs.encode(text), skip_special_tokens=True) == ours.decode(ours.encode(text))


def test_import_is_cheap() -> None:
    code = "import sys, ralo.tokenizer; sys.exit(bool({'tokenizers', 'jinja2', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
