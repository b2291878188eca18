"""Faulty tokenizers: every one a FormatError of one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import bpe_metadata, spm_metadata, write_directory
from tiny_tokens import make_spm, make_tokenizer

from ralo.errors import FormatError
from ralo.tokenizer import from_directory, from_gguf


def one_line_error(folder: Path) -> str:
    with pytest.raises(FormatError) as caught:
        from_directory(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_no_tokenizer(tmp_path: Path) -> None:
    assert "has no tokenizer.json" in one_line_error(tmp_path)
    assert "has no tokenizer.json" in one_line_error(tmp_path / "nowhere")


PANICS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
ABORTS = {"type": "BPE", "vocab": {"a": 0, "é": 1}, "merges": [["a", "é"]], "continuing_subword_prefix": "#"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"version": "1.0"}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}',
        b'{"model": {"type": "Other"}}',
        b"[" * 100_000,
        json.dumps(make_tokenizer(300) | {"post_processor": PANICS}).encode(),
        json.dumps(make_tokenizer(300) | {"model": ABORTS}).encode(),
        json.dumps(make_tokenizer(300) | {"model": ABORTS}).encode().replace(b"continuing", b"c\\u006fntinuing"),
    ],
    ids=range(13),
)
def test_bad_tokenizer_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json" in one_line_error(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config", [1]),
        ("tokenizer_config", {"eos_token": 5}),
        ("tokenizer_config", {"eos_token": ""}),
        ("tokenizer_config", {"bos_token": {"content": ["<s>"]}}),
        ("tokenizer_config", {"eos_token": "<|not there|>"}),
        ("tokenizer_config", {"chat_template": 7}),
        ("tokenizer_config", {"chat_template": [{"name": "default", "template": 7}]}),
        ("special_tokens_map", {"eos_token": "<|not there|>"}),
        ("generation_config", {"eos_token_id": [1, "2"]}),
        ("generation_config", {"eos_token_id": -1}),
        ("config", {"bos_token_id": 1.5}),
        ("config", {"bos_token_id": True}),
        ("config", {"eos_token_id": 2**40}),
    ],
)
def test_bad_files_beside_it(name: str, content: Any, tmp_path: Path) -> None:
    assert f"{name}.json" in one_line_error(write_directory(tmp_path, **{name: content}))


def test_files_that_are_not_json_or_text(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "config.json" in one_line_error(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja" in one_line_error(tmp_path)


def test_huge_files_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(600 << 20)  # a hole: nothing is written
    assert "more than 512 MB is refused" in one_line_error(tmp_path)


def test_panics_outside_of_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As the Rust library throws it."""

    class Broken:
        def encode(self, *args: Any, **kwargs: Any) -> Any:
            raise PanicException("index out of\nbounds")

    tokenizer = from_gguf(bpe_metadata(), Path("tiny.gguf"))
    monkeypatch.setattr(tokenizer, "_inner", Broken())
    with pytest.raises(FormatError, match=r"tiny\.gguf.*index out of bounds"):
        tokenizer.encode("x")


def test_interrupts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def encode(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    tokenizer = from_gguf(bpe_metadata(), Path("tiny.gguf"))
    monkeypatch.setattr(tokenizer, "_inner", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("x")


TOKENS = make_spm(400)[0]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, "ggml.model is missing"),
        (spm_metadata(model="bert"), "'bert'; supported: llama, gpt2"),
        (spm_metadata(model=3), "is of type int, not str"),
        (spm_metadata(tokens=None), "tokens is missing"),
        (spm_metadata(tokens="abc"), "is of type str, not list"),
        (spm_metadata(tokens=[]), "has 0 entries"),
        (spm_metadata(tokens=[*TOKENS[:-1], 7]), "entry 399 is not text"),
        (spm_metadata(tokens=[*TOKENS[:-1], "x" * 5000]), "entry 399 is not text of at most"),
        (spm_metadata(tokens=[*TOKENS[:-1], "he"]), "entry 399 repeats entry"),
        (spm_metadata(tokens=[*TOKENS[:-1], "\ud800"]), "not a usable tokenizer"),
        (spm_metadata(scores=None), "scores is missing"),
        (spm_metadata(scores=[0.0] * 7), "has 7 entries for 400 tokens"),
        (spm_metadata(scores=[float("nan")] * 400), "entry 0 is not a finite number"),
        (spm_metadata(scores=["x"] * 400), "entry 0 is not a finite number"),
        (spm_metadata(token_type=[1] * 9), "has 9 entries for 400 tokens"),
        (spm_metadata(token_type=[1.0] * 400), "entry 0 is not a finite number"),
        (spm_metadata(bos_token_id=400), "bos_token_id is 400; there are 400 tokens"),
        (spm_metadata(eos_token_id=-1), "eos_token_id is -1"),
        (spm_metadata(eot_token_id=1.5), "is of type float, not int"),
        (spm_metadata(unknown_token_id=10**12), "unknown_token_id is 1000000000000"),
        (spm_metadata(add_bos_token=1), "is of type int, not bool"),
        (spm_metadata(chat_template=["x"]), "is of type list, not str"),
        (bpe_metadata(pre="klingon"), "'klingon'; supported: default, gpt-2"),
        (bpe_metadata(merges=None), "merges is missing"),
        (bpe_metadata(merges=["ab"]), "merges entry 0 is not two tokens that make a third: 'ab'"),
        (bpe_metadata(merges=["a b c"]), "merges entry 0 is not two tokens"),
        (bpe_metadata(merges=["e r", "q z"]), "merges entry 1 is not two tokens"),
        (bpe_metadata(merges=[3]), "merges entry 0 is not two tokens"),
        (bpe_metadata(bos_token_id=None, add_bos_token=True), "no ggml.bos_token_id"),
    ],
)
def test_bad_metadata(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError) as caught:
        from_gguf(metadata, Path("tiny.gguf"))
    assert reason in str(caught.value) and "tiny.gguf" in str(caught.value) and "\n" not in str(caught.value)
