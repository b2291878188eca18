"""How much memory ralo takes while it runs: in a process of its own, where no peer and no earlier model left any."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ralo.bench import Phase, Ralo
from ralo.errors import RaloError
from ralo.lm import load
from ralo.plan import Setup

REST_MB = 100  # Python, libraries and buffers: what weights and cache do not account for
SLACK = 1.1
CHILD = "import json, sys; from ralo import footprint; print(json.dumps(footprint.taken(*json.loads(sys.argv[1]))))"


def footprints(
    model: str, quant: str, kv: str, threads: int, phases: Sequence[Phase], setup: Setup | None = None
) -> list[dict[str, Any]]:
    """Per phase: memory in RAM after it, what weights and cache take of it, and the most that it should be."""
    asked = json.dumps([model, quant, kv, threads, phases, base64.b64encode(pickle.dumps(setup)).decode()])
    done = subprocess.run([sys.executable, "-P", "-c", CHILD, asked], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise RaloError(f"the process that measures ralo's memory failed: {why}")
    found = []
    for rss, weights, cache in json.loads(done.stdout.splitlines()[-1]):
        limit = SLACK * (weights + cache + REST_MB)
        sizes = {"rss_mb": rss, "weights_mb": weights, "kv_mb": cache, "rss_limit_mb": limit}
        found.append({**sizes, "rss_ok": 0 < rss <= limit})
    return found


def taken(
    model: str, quant: str, kv: str, threads: int, phases: Sequence[Phase], setup: str
) -> list[tuple[float, float, float]]:
    """In this process, per phase: MB in RAM, of weights (modes' own copies included), of the cache."""
    lm = load(model, quant, kv, threads, setup=pickle.loads(base64.b64decode(setup)))
    engine, found = Ralo(lm, lm.model, [0]), []
    for phase, ctx, tokens in phases:
        engine.start(ctx)
        engine.prefill(tokens) if phase == "prefill" else engine.decode(tokens)
        found.append((rss_mb(), lm.model.nbytes / 1e6, engine.seq.nbytes / 1e6))
    return found


def rss_mb() -> float:
    """Memory of this process that is in RAM now; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0
