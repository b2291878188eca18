"""The front door: loading, generating, streaming and measuring through `ralo.load`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import write_gguf, write_hf
from tiny_tokens import make_tokenizer

import ralo
from ralo import LM, RaloError, Sampling, _core
from ralo.cli import main

PROMPT = "It was a dark and stormy night, and"


@cache
def mini() -> LM:
    """The model that comes with the package."""
    return ralo.load()


def test_defaults() -> None:
    lm = mini()
    assert lm.quant == "int8" and lm.kv == "f16" and lm.model.cfg.arch == "llama"
    assert lm.new_sequence().kv == "f16" and len(lm.new_sequence()) == 0
    assert 0 in lm.stop_ids and lm.encode("Once")


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_every_precision_writes_text(tmp_path: Path, quant: str, kv: str) -> None:
    lm = ralo.load(write_hf(tmp_path, "llama"), quant=quant, kv=kv)
    assert lm.quant == quant and lm.new_sequence().kv == kv
    assert len(lm.generate([5, 6, 7], 8, temperature=0).tokens) <= 8


def test_paths_of_every_kind(tmp_path: Path) -> None:
    folder, file = write_hf(tmp_path / "hf", "llama", vocab_size=323), write_gguf(tmp_path / "m.gguf", "llama")
    for path in (folder, str(folder), file, str(file)):
        assert ralo.load(path).model.cfg.vocab == 323


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"model": "no/such/model"}, "no such model"),
        ({"quant": "int3"}, "quant must be one of auto, f32"),
        ({"kv": "f64"}, "kv must be one of f32, f16, int8"),
    ],
)
def test_what_cannot_be_loaded(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(RaloError, match=reason) as caught:
        ralo.load(**arguments)
    assert "\n" not in str(caught.value)


def test_threads() -> None:
    before = _core.threads()
    try:
        ralo.load(threads=1)
        assert _core.threads() == 1
        ralo.load(threads=3)
        assert _core.threads() == 3
    finally:
        _core.set_threads(before)


def test_greedy_is_deterministic() -> None:
    first, again = (mini().generate(PROMPT, 40, temperature=0) for _ in range(2))
    assert first.tokens == again.tokens and first.text == again.text and len(first.tokens) == 40
    assert mini().generate(PROMPT, 20, temperature=0).tokens == first.tokens[:20]


def test_seeds_repeat() -> None:
    texts = {seed: mini().generate(PROMPT, 30, seed=seed).text for seed in (1, 2, 3)}
    assert len(set(texts.values())) == 3
    assert mini().generate(PROMPT, 30, seed=2).text == texts[2]
    free = mini().generate(PROMPT, 30, sampling=Sampling(temperature=1.2))
    assert mini().generate(PROMPT, 30, temperature=1.2, seed=free.seed).text == free.text


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5, "temperature": 1.5}])
def test_streamed_pieces_are_the_text(options: dict[str, Any]) -> None:
    whole = mini().generate(PROMPT, 50, **options)
    pieces = list(mini().stream(PROMPT, 50, **options))
    assert "".join(pieces) == whole.text and len(pieces) >= 50
    assert PROMPT + whole.text == mini().tokenizer.decode(mini().encode(PROMPT) + whole.tokens)


def test_prompts_as_text_or_tokens() -> None:
    assert (
        mini().generate(mini().encode(PROMPT), 20, temperature=0).text
        == mini().generate(PROMPT, 20, temperature=0).text
    )


@pytest.mark.parametrize("start", range(5, 60, 7))
def test_stop_strings_anywhere_in_the_text(start: int) -> None:
    """Also where they begin or end in the middle of a token."""
    text = mini().generate(PROMPT, 40, temperature=0).text
    stop = text[start : start + 9]
    found = mini().generate(PROMPT, 40, temperature=0, stop=["never said", stop])
    assert found.text == text[: text.find(stop)] and found.stats.finish == "stop"
    assert "".join(mini().stream(PROMPT, 40, temperature=0, stop=[stop])) == found.text


def test_end_of_text_by_the_config_or_the_tokenizer(tmp_path: Path) -> None:
    probe = ralo.load(write_hf(tmp_path / "a", "llama", eos_token_id=None), quant="f32")
    tokens = probe.generate([5, 6, 7], 12, temperature=0).tokens
    end = next(token for at, token in enumerate(tokens) if at > 2 and token not in tokens[:at])
    lm = ralo.load(write_hf(tmp_path / "b", "llama", eos_token_id=[end, 96]), quant="f32")
    found = lm.generate([5, 6, 7], 12, temperature=0)
    assert found.tokens == tokens[: tokens.index(end)] and found.stats.finish == "eos"
    assert lm.stop_ids >= {1, end, 96}  # 1 is </s>, named by the tokenizer
    padded = write_hf(tmp_path / "c", "llama", vocab_size=400, eos_token_id=390)  # the tokenizer has fewer tokens
    assert ralo.load(padded).stop_ids == {1, 390}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens must not be negative"),
        ({"prompt": "x", "on_full": "wrap"}, "on_full must be one of stop, slide, error"),
        ({"prompt": [3, 8192]}, "token 8192 is not in the model's vocabulary of 8192"),
        ({"prompt": [-1]}, "token -1 is not"),
        ({"prompt": "x", "temperature": -1.0}, "temperature must be"),
        ({"prompt": [5] * 4097}, "the prompt is 4097 tokens, the model's context is 4096"),
    ],
)
def test_requests_that_make_no_sense(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(RaloError, match=reason) as caught:
        mini().generate(**arguments)
    assert "\n" not in str(caught.value)


def test_the_longest_prompt_is_a_full_context(tmp_path: Path) -> None:
    lm = ralo.load(write_hf(tmp_path, "llama", max_position_embeddings=20, seed=1))
    found = lm.generate([5] * 20, 10, temperature=0)
    assert len(found.tokens) == 1 and found.stats.finish == "context"
    assert len(lm.generate([5] * 20, 10, temperature=0, on_full="slide").tokens) == 10
    with pytest.raises(RaloError, match="context of 20 tokens is full"):
        lm.generate([5] * 20, 10, temperature=0, on_full="error")


def test_a_given_sequence_is_continued_also_an_empty_one() -> None:
    lm, seq = mini(), mini().new_sequence()
    ids = lm.encode(PROMPT)
    first = [piece.token for piece in lm.run(lm.request(ids, 6, temperature=0), seq)]
    assert seq.tokens == ids + first[:-1]
    ask = lm.request(first[-1:], 6, temperature=0)
    second = [piece.token for piece in lm.run(ask, seq)]
    assert first + second == lm.generate(PROMPT, 12, temperature=0).tokens and ask.stats.prompt_tokens == 1


def test_metrics_count_since_loading() -> None:
    lm = ralo.load()
    assert lm.metrics()["tokens"] == lm.metrics()["read_bytes"] == 0
    made = [lm.generate(PROMPT, n, temperature=0) for n in (5, 7)]
    pieces = list(lm.run(lm.request(PROMPT, 7, temperature=0, stop=[made[1].text[-1] + "never"])))
    assert pieces[-1].token == -1  # text that was held back, not a token
    found = lm.metrics()
    assert found["tokens"] == 19
    costs = [stats.prefill_bytes + stats.decode_bytes for stats in (made[0].stats, made[1].stats, made[1].stats)]
    assert found["read_bytes"] == sum(costs) > 0
    assert found["weight_bytes"] == lm.model.weights.nbytes and found["quant"] == "int8"
    assert found["isa"] == _core.level() and found["threads"] == _core.threads()


def test_perplexity_of_a_text() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20
    found = mini().perplexity(text, ctx=64, tokens=100)
    assert found.tokens == 100 and 1 < found.ppl < 1000
    assert mini().perplexity(text).tokens == len(mini().encode(text)) - 1
    assert mini().perplexity(text).ppl < found.ppl  # repetition is learnt within a window


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, "llama")
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer(300)))
    lm = ralo.load(folder)
    with pytest.raises(RaloError, match="the model 97: they do not belong together"):
        lm.generate("hello")


def test_progress_while_packing(tmp_path: Path) -> None:
    seen: list[float] = []
    ralo.load(write_hf(tmp_path, "llama"), progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) == 9  # four matrices a layer, and the head


def test_run_command_gives_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", PROMPT, "-n", "12", "--temperature", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    want = mini().generate(PROMPT, 12, temperature=0)
    assert found["text"] == want.text and found["decode_bytes"] == want.stats.decode_bytes and found["steps"] == 11
