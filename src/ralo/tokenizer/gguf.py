"""Builds a tokenizer from the metadata of a GGUF file, checked before it is believed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ralo.errors import FormatError
from ralo.tokenizer import bpe, spm
from ralo.tokenizer.guard import library_errors
from ralo.tokenizer.text import Tokenizer

MAX_TOKENS = 1 << 22
MAX_TOKEN = 4096  # characters

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Files often name one end token where chat models have several; these end a turn wherever they are control tokens.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that the `tokenizer.*` keys describe; `path` is the file named in errors."""
    return Reader(metadata, Path(path)).read()


class Reader:
    """The metadata of one file, each value checked as it is asked for."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path

    def read(self) -> Tokenizer:
        model = self.value("ggml.model", str)
        if model not in ("llama", "gpt2"):
            raise self.error("ggml.model", f"is {model!r:.40}; supported: llama, gpt2")
        self.tokens = self.read_tokens()
        self.types = self.read_types()
        self.bos_id = self.token_id("bos", "<s>" if model == "llama" else None)
        self.eos_id = self.token_id("eos", "</s>" if model == "llama" else None)
        self.ends = [end for end in (self.token_id("eot"), self.token_id("eom")) if end is not None]
        with library_errors(self._path):
            inner = self.build_llama() if model == "llama" else self.build_gpt2()
            self.add_tokens(inner)
            inner.post_processor = self.around_text(default_bos=model == "llama" or self.pre().add_bos)
        return Tokenizer(
            inner,
            self._path,
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            eos_ids=[*self.ends, *self.turn_ends()],
            chat_template=self.value("chat_template", str, None),
        )

    def build_llama(self) -> Any:
        scores = self.per_token("ggml.scores", numbers.Real)
        mergeable = [kind in (NORMAL, USER_DEFINED, UNUSED) for kind in self.types]
        space_prefix = self.value("ggml.add_space_prefix", bool, True)
        return spm.build(self.tokens, scores, mergeable, self.token_id("unknown", "<unk>"), space_prefix)

    def build_gpt2(self) -> Any:
        return bpe.build(self.tokens, self.read_merges(), self.pre())

    def pre(self) -> bpe.Pre:
        name = self.value("ggml.pre", str, "default")
        if name not in bpe.PRES:
            raise self.error("ggml.pre", f"is {name!r:.40}; supported: {', '.join(bpe.PRES)}")
        return bpe.PRES[name]

    def add_tokens(self, inner: Any) -> None:
        """Tokens found in the text before anything is merged; the special ones among them never show."""
        from tokenizers import AddedToken

        ends = {self.bos_id, self.eos_id, *self.ends}
        special = [t for i, t in enumerate(self.tokens) if self.types[i] in (UNKNOWN, CONTROL) or i in ends]
        defined = [t for i, t in enumerate(self.tokens) if self.types[i] == USER_DEFINED and i not in ends]
        inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])

    def around_text(self, default_bos: bool) -> Any:
        """What goes before and after every text."""
        from tokenizers import processors

        names, tokens = ["$A"], []
        if self.value("ggml.add_bos_token", bool, default_bos and self.bos_id is not None):
            names.insert(0, "bos")
            tokens.append(self.template_token("bos", self.bos_id))
        if self.value("ggml.add_eos_token", bool, False):
            names.append("eos")
            tokens.append(self.template_token("eos", self.eos_id))
        return processors.TemplateProcessing(single=names, special_tokens=tokens)

    def template_token(self, name: str, token_id: int | None) -> dict[str, Any]:
        if token_id is None:
            raise self.error(f"ggml.add_{name}_token", f"is set, but there is no ggml.{name}_token_id")
        return {"id": name, "ids": [token_id], "tokens": [self.tokens[token_id]]}

    def turn_ends(self) -> list[int]:
        return [i for i, t in enumerate(self.tokens) if t in TURN_ENDS and self.types[i] == CONTROL]

    def read_tokens(self) -> list[str]:
        tokens = self.value("ggml.tokens", list)
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise self.error("ggml.tokens", f"has {len(tokens)} entries; 1 to {MAX_TOKENS} can be used")
        for i, token in enumerate(tokens):
            if not isinstance(token, str) or len(token) > MAX_TOKEN:
                raise self.error("ggml.tokens", f"entry {i} is not text of at most {MAX_TOKEN} characters")
        # The library finds tokens by their spelling, so an empty one gets a spelling that is never shown.
        self.blank = {i for i, token in enumerate(tokens) if not token}
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        seen: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if seen.setdefault(token, i) != i:
                raise self.error("ggml.tokens", f"entry {i} repeats entry {seen[token]}: {token[:40]!r}")
        return tokens

    def read_types(self) -> list[int]:
        given = self._metadata.get("tokenizer.ggml.token_type") is not None
        kinds = self.per_token("ggml.token_type", numbers.Integral) if given else [NORMAL] * len(self.tokens)
        return [CONTROL if i in self.blank else kind for i, kind in enumerate(kinds)]

    def read_merges(self) -> list[tuple[str, str]]:
        known = set(self.tokens)
        merges = []
        for i, merge in enumerate(self.value("ggml.merges", list)):
            parts = merge.split(" ") if isinstance(merge, str) else []
            if len(parts) != 2 or not known.issuperset((*parts, "".join(parts))):
                raise self.error("ggml.merges", f"entry {i} is not two tokens that make a third: {str(merge)[:40]!r}")
            merges.append((parts[0], parts[1]))
        return merges

    def token_id(self, name: str, spelling: str | None = None) -> int | None:
        """The id under `<name>_token_id`, or else that of the token with this spelling."""
        key = f"ggml.{name}_token_id"
        number: int | None = self.value(key, int, None)
        if number is None:
            return self.tokens.index(spelling) if spelling in self.tokens else None
        if not 0 <= number < len(self.tokens):
            raise self.error(key, f"is {number}; there are {len(self.tokens)} tokens")
        return number

    def per_token(self, key: str, kind: Any) -> list[Any]:
        """One finite number of this kind for each token."""
        values: list[Any] = self.value(key, list)
        if len(values) != len(self.tokens):
            raise self.error(key, f"has {len(values)} entries for {len(self.tokens)} tokens")
        for i, value in enumerate(values):
            if not isinstance(value, kind) or not math.isfinite(value):
                raise self.error(key, f"entry {i} is not a finite number of the right kind")
        return values

    def value(self, key: str, kind: type, *default: Any) -> Any:
        """The value under a key, of this type; without a default, a missing key is an error."""
        value = self._metadata.get(f"tokenizer.{key}")
        if value is None:
            if not default:
                raise self.error(key, "is missing, so the file has no usable tokenizer")
            return default[0]
        value = value.tolist() if hasattr(value, "tolist") else value  # numpy's to Python's own
        if type(value) is not kind:
            raise self.error(key, f"is of type {type(value).__name__}, not {kind.__name__}")
        return value

    def error(self, key: str, reason: str) -> FormatError:
        return FormatError(self._path, f"tokenizer.{key} {reason}")
