"""The tokenizer that the rest of ralo sees: the Rust library's, with the ids and the template the model came with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ralo.errors import RaloError
from ralo.tokenizer.guard import library_errors
from ralo.tokenizer.stream import Stream


class Tokenizer:
    """Text to token ids and back.

    Special tokens spelled out in the text ("<|im_end|>") are read as those tokens, which chat prompts rely on.
    """

    def __init__(
        self,
        inner: Any,
        path: Path,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self._inner = inner  # a tokenizers.Tokenizer
        self._path = path  # the file named when it is at fault
        self._eos_id = eos_id  # the one that templates call eos_token
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids) | ({eos_id} if eos_id is not None else set())
        self.chat_template = chat_template
        self._pieces: dict[int, str | None] = {}  # those that were asked for
        with library_errors(path):
            self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            self.add_bos: bool = inner.encode("").ids[:1] == [bos_id]

    @property
    def has_chat(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The text's ids; special=True adds what the model expects around a text, mostly BOS before it."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RaloError("the text is not valid Unicode (half a surrogate pair); is the input UTF-8?") from None
        with library_errors(self._path):
            ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The ids' text, without special tokens."""
        with library_errors(self._path):
            text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, None for one that never shows: a special or an unknown id."""
        if token_id not in self._pieces:
            self._pieces[token_id] = None if token_id in self._special_ids else self._inner.id_to_token(token_id)
        return self._pieces[token_id]

    def stream(self, after: Sequence[int] = ()) -> Stream:
        """A decoder for ids that arrive one by one; `after` are ids whose text it continues, such as the prompt's."""
        return Stream(self, after)

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as the prompt that the model was trained on; encode it with special=False."""
        if self.chat_template is None:
            raise RaloError("this model has no chat template, so it cannot chat; use `ralo run` with a plain prompt")
        from ralo.tokenizer.chat import render

        return render(
            self.chat_template,
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._spelling(self.bos_id),
            eos_token=self._spelling(self._eos_id),
        )

    def talk(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation's ids, up to where the next answer starts. A model without a chat template goes on with the
        messages as one text. Templates know developers as the system."""
        if self.has_chat:
            known = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
            return self.encode(self.chat(known), special=False)
        return self.encode("".join(m["content"] + ("\n" if m["role"] == "assistant" else "") for m in messages))

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, from which `from_directory` makes the same tokenizer."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.add_bos,
            "bos_token": self._spelling(self.bos_id),
            "eos_token": self._spelling(self._eos_id),
            "eos_token_id": sorted(self.eos_ids),
            "chat_template": self.chat_template,
        }
        given = {key: value for key, value in config.items() if value is not None}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "tokenizer.json").write_text(self._inner.to_str(), encoding="utf-8")
            (folder / "tokenizer_config.json").write_text(json.dumps(given, indent=1), encoding="utf-8")
        except OSError as error:
            raise RaloError(f"cannot write the tokenizer to {folder}: {error.strerror}") from None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._inner.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def _spelling(self, token_id: int | None) -> str | None:
        if token_id is None:
            return None
        spelling: str | None = self._inner.id_to_token(token_id)
        return spelling
