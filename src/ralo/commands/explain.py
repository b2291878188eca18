"""What would run: per layer and site the storage, the bytes of a token, and what each mode does there."""

from __future__ import annotations

import argparse

from ralo import _core, screen
from ralo.commands.run import open_model
from ralo.lm import LM, LoadOptions
from ralo.options import add_flags, add_json, read_flags
from ralo.plan import add_mode_flags, read_setup
from ralo.sequence import KV_BYTES

HALVES = {"o": "attend", "up": "mlp"}  # the slot of a half is shown with the matrix that it changes most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadOptions)
    add_mode_flags(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = read_flags(LoadOptions, args)
    lm = open_model(options, read_setup(args))
    rows, info = plan(lm), about(lm)
    print(f"{options.model}: " + ", ".join(f"{k} {v}" for k, v in info.items()))
    columns = ("layer", "matrix", "sites", "in", "out", "storage", "bytes", "runs")
    shown = [[str(r[c]) if c != "bytes" else screen.size(float(str(r[c]))) for c in columns] for r in rows]
    screen.table(columns, shown)
    weights = sum(int(str(r["bytes"])) for r in rows)
    print(f"weights read per token: {screen.size(weights)}; cache per token of context: {screen.size(cache_bytes(lm))}")
    for note in lm.plan.notes:
        print(note)
    if args.json:
        read = {"weight_bytes_per_token": weights, "kv_bytes_per_position": cache_bytes(lm)}
        screen.json_line({**info, **read, "rows": rows, "notes": lm.plan.notes})
    return 0


def about(lm: LM) -> dict[str, object]:
    cfg = lm.model.cfg
    return {
        "arch": cfg.arch,
        "layers": cfg.n_layers,
        "D": cfg.d_model,
        "F": cfg.d_ff,
        "H": cfg.n_heads,
        "K": cfg.n_kv_heads,
        "E": cfg.head_dim,
        "V": cfg.vocab,
        "context": cfg.max_context,
        "act": cfg.act,
        "quant": lm.quant,
        "kv": lm.kv,
        "isa": _core.level(),
        "threads": _core.threads(),
    }


def plan(lm: LM) -> list[dict[str, object]]:
    """One row per matrix. Modes add to `runs` what they do there; with none on, everything is dense."""
    rows: list[dict[str, object]] = []
    for name, m in lm.model.weights.matrices().items():
        layer, _, matrix = name.removeprefix("layers.").rpartition(".")
        sites, out = "+".join(m.parts), sum(m.parts.values())
        row = {"layer": layer or "-", "matrix": matrix, "sites": sites, "in": m.ic, "out": out}
        others = lm.model.slots[int(layer or -1)].taken.get(f"{matrix}_weights")
        storage, size = (others.mode, others.nbytes) if others else (m.quant, m.nbytes)
        rows.append({**row, "storage": storage, "bytes": size, "runs": runs(lm, layer, matrix)})
    return rows


def runs(lm: LM, layer: str, matrix: str) -> str:
    """What stands in the slots of a matrix: its own, and those of the half of the layer that it belongs to."""
    slots = lm.model.slots[int(layer or -1)]  # the head is above the last layer
    names = (f"{matrix}_weights", matrix, HALVES.get(matrix, ""))
    said = [f"{slots.taken[name].mode}: {slots.taken[name].runs}" for name in names if name in slots.taken]
    said += [why if name in slots.taken else f"dense: {why}" for name in names if (why := slots.left.get(name))]
    return "; ".join(said) or "dense"


def cache_bytes(lm: LM) -> int:
    """Keys and values that one more position adds to what attention reads."""
    cfg = lm.model.cfg
    width = -(-cfg.head_dim // _core.HEAD_PAD) * _core.HEAD_PAD
    row = width * KV_BYTES[lm.kv] + (4 if lm.kv == "int8" else 0)
    return 2 * cfg.n_layers * cfg.n_kv_heads * row
