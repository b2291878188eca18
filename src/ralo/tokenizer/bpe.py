"""Builds a byte-level BPE tokenizer ("gpt2" in GGUF) from its tokens, merges and the name of its pre-tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pre:
    """How a text is cut into words before merging: by each pattern in turn, matches and gaps both kept."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # where the file does not say
    nfc: bool = False  # the model was trained on composed characters


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GAPS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{SYMBOLS}|{GAPS}"
QWEN2 = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{SYMBOLS}|{GAPS}"

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
MIXED_CASE = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
PATH_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = rf"{MIXED_CASE[0]}|{MIXED_CASE[1]}|\p{{N}}|{PATH_SYMBOLS}|{GAPS}"
GPT4O = rf"{MIXED_CASE[0]}{CONTRACTIONS}?|{MIXED_CASE[1]}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{PATH_SYMBOLS}|{GAPS}"

DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{GAPS}",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
FALCON = (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

PRES = {
    "default": Pre(DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4"), Pre((GPT2,))),
    **dict.fromkeys(("mpt", "olmo"), Pre((GPT2,), nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), Pre((r"\p{N}", GPT2))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"),
        Pre((LLAMA3,), whole_words=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Pre((LLAMA3,))),
    "qwen2": Pre((QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), Pre((QWEN2,))),
    "tekken": Pre((TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Pre((GPT4O,))),
    "deepseek-v3": Pre(DEEPSEEK3),
    "deepseek-coder": Pre(DEEPSEEK_CODER),
    "falcon": Pre(FALCON),
}


def build(tokens: Sequence[str], merges: Sequence[tuple[str, str]], pre: Pre) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {token: token_id for token_id, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(ids, list(merges), ignore_merges=pre.whole_words))
    if pre.nfc:
        inner.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    inner.decoder = decoders.ByteLevel()
    return inner
