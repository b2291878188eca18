"""Reads the tokenizer of a Hugging Face model directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ralo.errors import FormatError
from ralo.formats.strict_json import parse_object
from ralo.tokenizer.guard import library_errors
from ralo.tokenizer.text import Tokenizer

MAX_TOKENIZER = 512 << 20  # bytes; the largest in use are near 40 MB
MAX_CONFIG = 64 << 20
MOST_AROUND = 64  # tokens; models put one or two, and a file can ask for millions

# A BPE with such a prefix can make the Rust library abort the whole process, and no language model has one. Letters
# written as escapes could hide it, and nobody writes them so. (Each pattern starts with plain text: that is fast.)
UNSAFE = (
    re.compile(rb'continuing_subword_prefix"\s*:\s*"[^"]'),
    re.compile(rb"\\u00(?<!\\\\u00)(?:5[fF]|6|7[0-9aA])"),
)


def from_directory(path: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, with the ids and the chat template that the files beside it name."""
    path = Path(path)
    inner = open_tokenizer(path / "tokenizer.json")
    # All of them end a text; where one answer is due, a name goes before an id and an earlier file before a later.
    configs = {
        path / name: read_json(path / name)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
    }
    bos = [*named(inner, configs, "bos_token"), *numbered(inner, configs, "bos_token_id")]
    eos = [*named(inner, configs, "eos_token"), *numbered(inner, configs, "eos_token_id")]
    return Tokenizer(
        inner,
        path / "tokenizer.json",
        bos_id=bos[0] if bos else None,
        eos_id=eos[0] if eos else None,
        eos_ids=eos,
        chat_template=chat_template(path, configs[path / "tokenizer_config.json"]),
    )


def open_tokenizer(path: Path) -> Any:
    """The Rust library's tokenizer, set to encode whole texts and always the same way."""
    import tokenizers

    if not path.is_file():
        raise FormatError(
            path.parent,
            "has no tokenizer.json, which text needs; where the model has another kind of tokenizer file,"
            " transformers can write it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    data = read_bytes(path, MAX_TOKENIZER)
    if any(pattern.search(data) for pattern in UNSAFE):
        raise FormatError(path, "has a continuing_subword_prefix or escaped letters, neither of which is supported")
    with library_errors(path):
        inner = tokenizers.Tokenizer.from_buffer(data)
        # Some files keep the settings of their last training run: cut and pad every text, merge at random.
        inner.no_truncation()
        inner.no_padding()
        if getattr(inner.model, "dropout", None) is not None:
            inner.model.dropout = None
        if (around := inner.num_special_tokens_to_add(False)) > MOST_AROUND:
            raise FormatError(path, f"puts {around} tokens around every text; at most {MOST_AROUND} were expected")
    return inner


def named(inner: Any, configs: Mapping[Path, dict[str, Any]], key: str) -> list[int]:
    """The ids of the tokens spelled under this key, which become special where tokenizer.json does not say so."""
    ids = []
    for path, config in configs.items():
        token = config.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            continue
        if not isinstance(token, str) or not token:
            raise FormatError(path, f"{key} is neither a token nor null")
        with library_errors(path):
            token_id = inner.token_to_id(token)
        if token_id is None:
            raise FormatError(path, f"{key} {token!r:.80} is not in tokenizer.json")
        inner.add_special_tokens([token])
        ids.append(token_id)
    return ids


def numbered(inner: Any, configs: Mapping[Path, dict[str, Any]], key: str) -> list[int]:
    """The ids under this key, one or a list, less those that the vocabulary does not have."""
    ids: list[int] = []
    for path, config in configs.items():
        value = config.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int and 0 <= number < 1 << 32 for number in values):
            raise FormatError(path, f"{key} is neither a token id nor a list of them")
        # Library defaults such as 50256 stay in the config of models with a smaller vocabulary.
        ids.extend(number for number in values if inner.id_to_token(number) is not None)
    return ids


def chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template in its own file or in the config; of several with names, the one called default."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        with library_errors(own_file, "not a usable chat template"):
            return read_bytes(own_file, MAX_CONFIG).decode("utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        chosen = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = chosen[0].get("template") if chosen else None
    if value is not None and not isinstance(value, str):
        raise FormatError(folder / "tokenizer_config.json", "chat_template is neither text nor a list of named texts")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file."""
    if not path.is_file():
        return {}
    return parse_object(read_bytes(path, MAX_CONFIG), path)


def read_bytes(path: Path, limit: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit:
            raise FormatError(path, f"is {size >> 20} MB; more than {limit >> 20} MB is refused")
        return path.read_bytes()
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror}") from None
