"""How fast: engines measured in turns in one process, medians and spread, beside the memory's own speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ralo import _core
from ralo.generate import Request, Stats, generate
from ralo.lm import LM
from ralo.model import Runner
from ralo.sampling import Sampler, Sampling

STREAM_WORDS = 1 << 25  # 256 MB: far more than any cache
SETTLE_S = 0.05  # a peer's threads spin on for a while after their work and would slow the memory's measurement
PIECE = 16  # tokens that engines that hardly differ decode in turn
Phase = tuple[str, int, int]  # decode or prefill, tokens of context before it, tokens of a round


class Engine(Protocol):
    """Something that decodes: ralo, or a peer."""

    def start(self, ctx: int) -> None:
        """An empty text, or one of `ctx` tokens; whatever came after is forgotten."""
        ...

    def prefill(self, tokens: int) -> float:
        """Seconds to run a prompt of so many tokens after the start."""
        ...

    def decode(self, tokens: int) -> float:
        """Seconds to decode so many tokens, one at a time."""
        ...


class Ralo:
    """A runner on real text: how much a mode skips depends on what the text says."""

    def __init__(self, lm: LM, runner: Runner, text: Sequence[int]) -> None:
        self.runner, self.seq, self.text = runner, lm.new_sequence(), text
        self.stats = Stats()

    def start(self, ctx: int) -> None:
        self.seq.trim(min(ctx, len(self.seq)))
        if len(self.seq) < ctx:
            self._run(ctx - len(self.seq), 0)

    def prefill(self, tokens: int) -> float:
        return self._run(tokens, 0).prefill_s

    def decode(self, tokens: int) -> float:
        return self._run(1, tokens + 1).decode_s  # the first token comes from the prompt's own pass

    def bytes_per_token(self, phase: str) -> float:
        """Of the last round, as the kernels counted them."""
        return self.stats.prefill_bytes / self.stats.prompt_tokens if phase == "prefill" else self.stats.bytes_per_token

    def _run(self, prompt: int, new: int) -> Stats:
        tokens = [self.text[(len(self.seq) + i) % len(self.text)] for i in range(prompt)]
        request = Request(tokens, Sampler(Sampling(temperature=0)), new)
        for _ in generate(self.runner, self.seq, request):
            pass
        self.stats = request.stats
        return request.stats


@dataclass
class Samples:
    """Tokens per second of each engine, round by round, and the memory's read speed in the same rounds."""

    tok_s: dict[str, list[float]] = field(default_factory=dict)
    stream_gb_s: list[float] = field(default_factory=list)

    def median(self, name: str) -> float:
        return statistics.median(self.tok_s[name])

    def ratio(self, a: str, b: str) -> tuple[float, tuple[float, float]]:
        """Median of the rounds' own ratios a / b, and the interval that holds 95 % of resampled medians."""
        ratios = np.array(self.tok_s[a]) / np.array(self.tok_s[b])
        picks = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
        low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5))
        return float(np.median(ratios)), (float(low), float(high))


def measure(
    engines: dict[str, Engine], phase: str, ctx: int, tokens: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> Samples:
    """Every engine once per round, in turns, so that a slow moment of the machine hits all of them."""
    samples = Samples({name: [] for name in engines})
    buffer = np.ones(STREAM_WORDS, np.uint64)
    for i in range(rounds + 1):
        for name, engine in engines.items():
            engine.start(ctx)
            seconds = engine.prefill(tokens) if phase == "prefill" else engine.decode(tokens)
            if i:  # the first round warms up
                samples.tok_s[name].append(tokens / seconds)
        if i:
            time.sleep(SETTLE_S)
            samples.stream_gb_s.append(stream_gb_s(buffer))
        tick()
    return samples


def measure_closely(engines: dict[str, Engine], ctx: int, tokens: int, rounds: int) -> Samples:
    """Decode of engines that hardly differ: a round's tokens a few at a time, in turns, the first to go taking turns
    too. What slows the machine down for longer than that then slows all of them."""
    samples = Samples({name: [] for name in engines})
    for i in range(rounds + 1):
        took = dict.fromkeys(engines, 0.0)
        for engine in engines.values():
            engine.start(ctx)
        for piece in range(tokens // PIECE):
            for name in list(engines) if piece % 2 else reversed(engines):
                took[name] += engines[name].decode(PIECE)
        for name, seconds in took.items():
            if i:  # the first round warms up
                samples.tok_s[name].append(tokens // PIECE * PIECE / seconds)
    return samples


def stream_gb_s(buffer: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> float:
    clock = time.perf_counter()
    _core.stream_read(buffer)
    return buffer.nbytes / (time.perf_counter() - clock) / 1e9


def row(lm: LM, samples: Samples, what: Phase, bytes_per_token: float, peer: Sequence[str] = ()) -> dict[str, object]:
    """One row of speed as in the JSON; `peer` is its name and precision. With no mode on, dense is what was run."""
    speedup, interval = samples.ratio("ralo", "dense") if "dense" in samples.tok_s else (1.0, (1.0, 1.0))
    phase, ctx, tokens = what
    tok_s, stream = samples.median("ralo"), statistics.median(samples.stream_gb_s)
    rates = samples.tok_s["ralo"]
    out: dict[str, object] = {
        "phase": phase,
        "ctx": ctx,
        "tokens": tokens,
        "quant": lm.quant,
        "kv": lm.kv,
        "threads": _core.threads(),
        "isa": _core.level(),
        "tok_s": tok_s,
        "tok_s_range": [min(rates), max(rates)],
        "dense_tok_s": samples.median("dense") if "dense" in samples.tok_s else tok_s,
        "speedup": speedup,
        "ci95": list(interval),
        "bytes_per_token": bytes_per_token,
        "gb_s": bytes_per_token * tok_s / 1e9,
        "stream_gb_s": stream,
        "bandwidth_share": bytes_per_token * tok_s / 1e9 / stream,
    }
    if peer:
        ratio, interval = samples.ratio("ralo", peer[0])
        theirs = samples.tok_s[peer[0]]
        out |= {"peer": peer[0], "peer_quant": peer[1], "peer_tok_s": samples.median(peer[0])}
        out |= {"peer_tok_s_range": [min(theirs), max(theirs)], "vs_peer": ratio, "vs_peer_ci95": list(interval)}
    return out
