"""A model's shape in ralo's own words, whatever its checkpoint calls things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ralo.errors import FormatError

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base, rotated width, and the scaling rule with its parameters."""

    theta: float
    dim: int
    kind: str = "default"  # default, linear, dynamic, llama3, yarn, factors
    params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """T tokens, D model width, F MLP width, H heads, K kv heads, E head width, V vocabulary."""

    arch: str
    d_model: int  # D
    n_layers: int
    n_heads: int  # H
    n_kv_heads: int  # K
    head_dim: int  # E
    d_ff: int  # F
    vocab: int  # V
    max_context: int
    act: str
    gated: bool  # down(act(gate x) * up x) rather than down(act(up x))
    norm: str  # rms or layer
    norm_eps: float
    rope: Rope | None
    windows: tuple[int, ...]  # per layer: keys a query may look back, itself included; 0 = all
    position_rows: int = 0  # learned positions; 0 = none
    position_offset: int = 0  # row of position 0
    tied: bool = False  # the output head is the embedding
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim


class Fields:
    """Checked reading of a config.json: every value has its type and range, or one clear line says which has not."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def fail(self, reason: str) -> FormatError:
        return FormatError(self.path, reason)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is ...:
                raise self.fail(f"{key!r} is missing")
            return default
        return value

    def int(self, key: str, low: int = 1, high: int = 1 << 24, default: Any = ...) -> int:
        value = self._get(key, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(f"{key!r} must be a whole number from {low} to {high}, got {short(value)}")
        return value

    def float(self, key: str, low: float, high: float, default: Any = ...) -> float:
        value = self._get(key, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.fail(f"{key!r} must be a number from {low:g} to {high:g}, got {short(value)}")
        return float(value)

    def bool(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key!r} must be true or false, got {short(value)}")
        return value

    def one_of(self, key: str, choices: Mapping[str, str], default: Any = ...) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.fail(f"{key!r} is {short(value)}; supported: {', '.join(sorted(choices))}")
        return choices[value]

    def sub(self, key: str) -> Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(f"{key!r} must be an object, got {short(value)}")
        return Fields(value, self.path)

    def ids(self, key: str) -> TokenIds:
        """A token id, a list of them, or nothing."""
        value = self.values.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < -1 for i in items):
            raise self.fail(f"{key!r} must be a token id or a list of them, got {short(value)}")
        return tuple(i for i in items if i >= 0)


def short(value: Any) -> str:
    """A value for an error line: its repr, one line, not longer than a glance."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
