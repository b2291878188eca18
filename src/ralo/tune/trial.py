"""Plans tried end to end: how far from dense, and how much faster, each figure measured once and kept in the record."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ralo.bench import Engine, Ralo, measure
from ralo.compose import compose
from ralo.guard import Guard
from ralo.lm import LM
from ralo.model import Dense, Model
from ralo.modes import Mode
from ralo.modes.mix import HEAD
from ralo.plan import tables_of
from ralo.profile import Profile
from ralo.quality import F64, losses, perplexity
from ralo.sampling import Sampler, Sampling
from ralo.sequence import Sequence as TextState
from ralo.tune.record import Record

WINDOW = 1024  # tokens that quality is measured in, where no longer context is asked for
LONG = 2048  # context from which quality is measured there too: modes that choose keys work from about here on
TOKENS, ROUNDS = 64, 15  # of a speed measurement
TURNS = 3  # of plans that are compared with each other; the rounds are shared out
QUICK = 8192  # tokens of text that modes are looked at with before any is chosen
PROMPT = 512  # tokens of a request's prompt, where throughput counts
SLACK = 1.25  # times the budget, that the upper end of the interval may be
UNSEEN = 0.005  # points of perplexity that no measurement tells from nothing


@dataclass(frozen=True)
class Loss:
    """What a plan costs: the worst over the contexts it was measured at."""

    delta_ppl_pct: float
    low: float
    high: float
    kl: float
    top1_agree: float
    tokens: int

    def fits(self, max_dppl: float) -> bool:
        return self.delta_ppl_pct <= max_dppl + UNSEEN and self.high <= SLACK * max_dppl + UNSEEN

    def share(self, max_dppl: float) -> float:
        """Of what is allowed; more than 1 where it does not fit."""
        return max(self.delta_ppl_pct / (max_dppl + UNSEEN), self.high / (SLACK * max_dppl + UNSEEN))


@dataclass(frozen=True)
class Gain:
    """How much faster than dense, at one context."""

    ctx: int
    speedup: float
    low: float
    high: float
    tok_s: float
    dense_tok_s: float
    nbytes: int  # of weights, the ones that are stood in for left out: what a pack of the plan takes
    dense_nbytes: int
    cache_nbytes: int


@dataclass
class Texts:
    """Three texts: what costs are learned on, what plans are tuned on, and what the best ones are checked on."""

    look: list[int]
    dial: list[int]
    check: list[int]


@dataclass
class Trials:
    lm: LM
    record: Record
    texts: Texts
    contexts: Sequence[int]
    goal: str = "latency"
    profile: Profile | None = None
    _prompts: dict[int, TextState] = field(default_factory=dict)
    _dense: F64 | None = None  # losses on the text to tune on

    def loss(self, modes: Sequence[Mode], quick: bool = False) -> Loss:
        """On the text to check with; `quick`: on some of the text to tune on. The worst of the contexts counts."""

        def found() -> dict[str, Any]:
            self.use(modes)
            text = self.texts.dial[: QUICK + 1] if quick else self.texts.check
            each = [self._quality(text, self.window, 0)]
            if LONG <= self.longest < len(text):
                each.append(self._quality(text, self.longest, self.longest // 2))
            return {"each": each}

        each = self.record.get(f"{'quick ' * quick}loss of {key_of(modes)}", found)["each"]
        return max((Loss(**q) for q in each), key=lambda q: q.delta_ppl_pct)

    def delta(self, modes: Sequence[Mode]) -> float:
        """Percent of perplexity on the text to tune on, in short windows."""

        def found() -> dict[str, Any]:
            text, model = self.texts.dial, self.lm.model
            if self._dense is None:
                self.use(())
                self._dense = losses(model, text, self.window, self.lm.kv, exact=False)
            self.use(modes)
            ours = losses(model, text, self.window, self.lm.kv, exact=False)
            return {"delta_ppl_pct": 100 * math.expm1(float((ours - self._dense).mean()))}

        return float(self.record.get(f"delta of {key_of(modes)}", found)["delta_ppl_pct"])

    @property
    def window(self) -> int:
        return min(WINDOW, self.lm.model.cfg.max_context)

    def _quality(self, text: Sequence[int], ctx: int, first: int) -> dict[str, Any]:
        q = perplexity(self.lm.model, text, ctx, self.lm.kv, exact=False, first=first)
        (low, high), kl = q.ci95, q.kl
        return {"delta_ppl_pct": q.delta_ppl_pct, "low": low, "high": high, "kl": kl, "top1_agree": q.top1_agree,
                "tokens": q.tokens}  # fmt: skip

    def gains(self, modes: Sequence[Mode]) -> list[Gain]:
        found = self.record.get(f"{self.goal} of {key_of(modes)}", lambda: {"gains": self._gains(modes, ROUNDS)})
        return [Gain(**g) for g in found["gains"]]

    def compare(self, plans: Sequence[Sequence[Mode]]) -> list[list[Gain]]:
        """Gains of several plans that take turns, the middle one of each: whatever else the machine does meanwhile, it
        does to all of them."""

        def found() -> dict[str, Any]:
            turns = [[self._gains(modes, max(1, ROUNDS // TURNS)) for modes in plans] for _ in range(TURNS)]
            return {"each": [[_middle([turn[p][c] for turn in turns]) for c in range(len(self.contexts))]
                             for p in range(len(plans))]}  # fmt: skip

        keys = ", ".join(key_of(modes) for modes in plans)
        each = self.record.get(f"{self.goal} of {keys} in turns", found)["each"]
        return [[Gain(**g) for g in gains] for gains in each]

    def _gains(self, modes: Sequence[Mode], rounds: int) -> list[dict[str, Any]]:
        self.use(modes)
        return [self._gain(ctx, rounds) for ctx in self.contexts]

    def _gain(self, ctx: int, rounds: int) -> dict[str, Any]:
        lm = self.lm
        engines = {"ralo": self.engine(lm.runner(Sampler(Sampling(temperature=0))), ctx)}
        engines["dense"] = self.engine(Dense(lm.model), ctx)
        named: dict[str, Engine] = dict(engines)
        if self.goal == "throughput":
            named = {name: Requests(engine) for name, engine in engines.items()}
        samples = measure(named, "decode", ctx, TOKENS, rounds)
        ratio, (low, high) = samples.ratio("ralo", "dense")
        return {"ctx": ctx, "speedup": ratio, "low": low, "high": high, "tok_s": samples.median("ralo"),
                "dense_tok_s": samples.median("dense"), "nbytes": packed_bytes(lm.model),
                "dense_nbytes": lm.model.weights.nbytes, "cache_nbytes": engines["ralo"].seq.nbytes}  # fmt: skip

    def engine(self, runner: Any, ctx: int) -> Ralo:
        """After a prompt that is run once: prompts are dense, whatever runs after them."""
        engine = Ralo(self.lm, runner, self.texts.dial)
        if ctx not in self._prompts:
            self._prompts[ctx] = self.lm.new_sequence()
            prompt = [self.texts.dial[i % len(self.texts.dial)] for i in range(ctx)]
            if prompt:
                self.lm.model.prefill(prompt, self._prompts[ctx], dense=True)
        engine.seq = self._prompts[ctx].clone()
        return engine

    def use(self, modes: Sequence[Mode]) -> None:
        """These modes, under a guard that has seen nothing yet."""
        self.lm.use(compose([]), self.profile)
        self.lm.guard = Guard(self.lm.model, self.lm.guard.options)
        self.lm.use(compose(modes), self.profile)

    @property
    def longest(self) -> int:
        return max(self.contexts)


@dataclass
class Requests:
    """Whole requests: a prompt, then the answer."""

    engine: Ralo

    def start(self, ctx: int) -> None:
        self.engine.start(ctx)

    def prefill(self, tokens: int) -> float:
        return self.engine.prefill(tokens)

    def decode(self, tokens: int) -> float:
        room = self.engine.runner.cfg.max_context - len(self.engine.seq) - tokens - 2
        return self.engine.prefill(min(PROMPT, room)) + self.engine.decode(tokens)


def _middle(gains: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return sorted(gains, key=lambda g: g["speedup"])[len(gains) // 2]


def packed_bytes(model: Model) -> int:
    matrices = model.weights.matrices()
    places = [
        (i, name.removesuffix("_weights"))
        for i, slots in enumerate(model.slots)
        for name in slots.taken
        if name.endswith("_weights")
    ]
    stood_in = sum(matrices[place if place == HEAD else f"layers.{i}.{place}"].nbytes for i, place in places)
    return model.nbytes - stood_in


def key_of(modes: Sequence[Mode]) -> str:
    """A short name for what a plan does."""
    if not modes:
        return "dense"
    written = json.dumps(tables_of(modes), sort_keys=True)
    names = "+".join(mode.name for mode in modes)
    return f"{names} {hashlib.blake2b(written.encode(), digest_size=6).hexdigest()}"
