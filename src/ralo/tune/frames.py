"""Modes that are on or off as a whole: what can be tried on a model, and how two of them become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ralo.compose import compose
from ralo.config import ModelConfig
from ralo.errors import RaloError
from ralo.modes import KWTA, Event, Mode, StatePack
from ralo.modes.base import ZEROS, Override
from ralo.modes.share import KEEP_ALL

KEYS = (256.0, 384.0, 768.0)  # numbers of keys that are tried
GATE_HALVED = KWTA(k=1.0, where=(Override(None, frozenset(("up",)), {"k": KEEP_ALL}),))
HEAD_HALVED = KWTA(k=1.0, gate="off", head="on")  # and nothing else
FAR = 1024  # tokens of context by which modes that choose keys have begun


@dataclass(frozen=True)
class Frame:
    name: str  # for people
    modes: tuple[Mode, ...]
    kind: str  # of several of one kind only one is taken


def frames(cfg: ModelConfig, longest: int, made: Sequence[Mode], head: bool, halved: bool) -> list[Frame]:
    """What is worth a try: by the model's activation, the context that is asked for, packs that were made, whether the
    head has much to save, and whether layers can be read by halves."""
    out = [Frame(mode.name, (mode,), mode.name) for mode in made]
    if cfg.act in ZEROS and cfg.gated:
        out.append(Frame("state-pack mlp", (StatePack(target="mlp"),), "neurons"))
        out.append(Frame("kwta gate", (KWTA(k=1.0),), "neurons"))
        out += [Frame("kwta gate by halves", (GATE_HALVED,), "neurons")] * halved
    if longest > FAR:
        begin = min(StatePack().min_ctx, longest // 2)
        packs = [StatePack(target="kv", keys=keys, min_ctx=begin) for keys in KEYS if keys < longest / 2]
        out += [Frame(f"state-pack {p.keys:g} keys", (p,), "keys") for p in packs]
    if head:
        out.append(Frame("kwta head", (HEAD_HALVED,), "head"))
    out.append(Frame("event", (Event(),), "event"))
    return out


def joined(frame: Sequence[Mode], more: Sequence[Mode]) -> tuple[Mode, ...] | None:
    """Both, each mode once; None where they do not go together."""
    out = {mode.name: mode for mode in frame}
    for mode in more:
        have = out.get(mode.name)
        merged = mode if have is None else _merged(have, mode)
        if merged is None:
            return None
        out[mode.name] = merged
    try:
        return compose(out.values()).modes
    except RaloError:
        return None


def _merged(a: Mode, b: Mode) -> Mode | None:
    if isinstance(a, StatePack) and isinstance(b, StatePack) and {a.target, b.target} == {"kv", "mlp"}:
        return replace(a if a.target == "kv" else b, target="both")
    if isinstance(a, KWTA) and isinstance(b, KWTA):
        # Neurons and the head are on where one of them says so; the channels are of the one that has a dial.
        gate = a.gate if a.gate != "off" else b.gate
        head = "on" if "on" in (a.head, b.head) else b.head
        channels = b if b.where else a
        return replace(channels, gate=gate, head=head)
    return None
