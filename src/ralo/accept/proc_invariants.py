"""What holds of procedural weights whatever they gain: the same on every CPU, deltas that are shed,
bad packs refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ralo import _core, texts
from ralo.accept.rows import Row, holds, tried
from ralo.accept.watched import caught, infinite, watched
from ralo.compose import compose
from ralo.errors import RaloError
from ralo.formats import packed, safetensors
from ralo.lm import LM, load
from ralo.modes import Proc
from ralo.modes.base import TARGETS, LayerSlots
from ralo.modes.proc import ProcSlot
from ralo.proc.matrix import ProcMatrix

STEPS = 16

mode = Proc.name


def accept_invariants(lm: LM, matrices: list[ProcMatrix], at: Path) -> list[Row]:
    """Of the weights that are on, whose pack is the one called straight; all is off afterwards."""
    pack = str(at / "straight")
    text = texts.sample(lm)
    dense, on = _run(lm, text, True), _run(lm, text, False)
    read = lm.metrics()
    lm.use(compose([Proc(on="off")]))
    off = _run(lm, text, False)
    level, threads = _core.level(), _core.threads()
    digests = set()
    for name in _core.levels():
        for n in (1, 2):
            _core.force_level(name)
            _core.set_threads(n)
            digests.add(tuple(m.digest() for m in matrices))
    _core.force_level(level)
    _core.set_threads(threads)
    return [
        holds(mode, "off: dense bit for bit", bool((dense == off).all())),
        holds(mode, "on: not dense", bool((dense != on).any()), f"memory {read['proc.mem_ratio']:.3f} of bf16"),
        holds(mode, "rebuilt weights are the same at every ISA level and number of threads", len(digests) == 1),
        _refused("a damaged pack is refused", at, _damage),
        _refused("a pack of a newer ralo is refused", at, _newer),
        _shed(lm, pack),
        _planted(lm, pack),
        *tried(mode, "guard and metrics", lambda: watched(lm, Proc(pack=pack))),
    ]


def _shed(lm: LM, pack: str) -> Row:
    """A watermark of 0 leaves no delta."""
    lm.use(compose([Proc(pack=pack)]))
    had = sum(len(m.deltas.at) for slots in lm.model.slots for m in _made(slots))
    lm.use(compose([Proc(pack=pack, watermark=0)]))
    found = lm.metrics()
    trims, left = int(float(found["proc.trims"])), float(found["proc.fanout_effective"])
    said = f"{trims} of {had} trimmed, {left:g} a channel left"
    return holds(mode, "a watermark sheds deltas at run time and counts them", trims == had and left == 0, said)


def _made(slots: LayerSlots) -> list[ProcMatrix]:
    found = [o.slot.matrix for o in slots.taken.values() if isinstance(o.slot, ProcSlot)]
    return [m for m in found if isinstance(m, ProcMatrix)]


def _planted(lm: LM, pack: str) -> Row:
    """An infinite scale beside the first seeds there are."""
    lm.use(compose([Proc(pack=pack)]))
    name, slots = next((name, slots) for slots in lm.model.slots for name in slots.taken)
    m = _made(slots)[0]
    bad = ProcMatrix(m.ic, m.parts, m.data, infinite(m.scales), m.bias, m.tables, m.deltas)
    slots.put(name, ProcSlot(bad, 0), mode, "broken")
    lm.model.use(lm.model.slots)
    return caught(lm, mode, "a planted Inf falls back to dense and is counted", 1)


def _run(lm: LM, text: list[int], dense: bool) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    seq = lm.new_sequence()
    return np.stack([lm.model.step(token, seq, dense) for token in text[:STEPS]])


def _damage(pack: Path) -> None:
    """One bit of one seed."""
    tensors = safetensors.open_file(pack / packed.WEIGHTS)
    seeds = next(t for name, t in tensors.items() if name.endswith(f".{TARGETS['mlp'][0]}.data"))
    with open(pack / packed.WEIGHTS, "r+b") as file:
        file.seek(seeds.start)
        byte = file.read(1)[0]
        file.seek(seeds.start)
        file.write(bytes([byte ^ 1]))


def _newer(pack: Path) -> None:
    info = pack / packed.INFO
    info.write_text(info.read_text().replace('"format": 2', '"format": 99', 1))


def _refused(line: str, at: Path, spoil: Callable[[Path], None]) -> Row:
    copy = at / "spoilt"
    shutil.copytree(at / "straight", copy)
    try:
        spoil(copy)
        load(str(copy))
        return holds(mode, line, False)
    except RaloError as error:
        return holds(mode, line, "\n" not in str(error), str(error).replace(str(at), "…"))
    finally:
        shutil.rmtree(copy)
