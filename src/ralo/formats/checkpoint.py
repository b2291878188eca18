"""What every format reader returns: a Hugging Face style config, named tensors, and where the tokenizer lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralo.errors import FormatError
from ralo.formats.tensor import Tensor

if TYPE_CHECKING:
    from ralo.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    config: Mapping[str, Any]  # keys as in config.json, whatever the file's own spelling
    tensors: Mapping[str, Tensor]  # names as in a Hugging Face checkpoint
    tokenizer: Callable[[], Tokenizer]  # opened only by who needs text
    config_path: Path  # the file named when the config is at fault

    def find(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise FormatError(self.path, "missing; the checkpoint is incomplete or of another architecture", name)
        return self.tensors[name]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The named tensor, checked to have the shape that the config promises."""
        tensor = self.find(name)
        if tensor.shape != shape:
            raise FormatError(self.path, f"has shape {tensor.shape}, the config asks for {shape}", name)
        return tensor
