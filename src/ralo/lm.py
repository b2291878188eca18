"""The front door: load a model, generate, measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralo import _core, cpu, loader, metrics
from ralo import profile as profiles
from ralo.compose import Plan, compose
from ralo.errors import RaloError
from ralo.generate import ON_FULL, Piece, Request, Stats, generate
from ralo.guard import Guard, GuardOptions
from ralo.matrix import QUANTS
from ralo.model import Model, Runner
from ralo.modes import Mode
from ralo.modes.base import views_of
from ralo.options import flag
from ralo.plan import Setup, check_layers, plan_warnings, read_plan
from ralo.profile import Profile
from ralo.quality import Quality, perplexity
from ralo.sampling import Sampler, Sampling
from ralo.sequence import KV_KINDS
from ralo.sequence import Sequence as TextState
from ralo.verify import Drafting, Verified
from ralo.weights import PLACES, Weights

if TYPE_CHECKING:
    from ralo.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadOptions:
    model: str = flag("mini", "mini, a Hugging Face directory, a .gguf file, or a packed directory", short="-m")
    quant: str = flag("auto", "precision of the weights; auto = as packed, else int8", choices=("auto", *QUANTS))
    kv: str = flag("f16", "precision of the key/value cache", choices=KV_KINDS)
    threads: int = flag(0, "threads; 0 = physical cores this process may use", low=0, high=1024)


@dataclass
class Generation:
    """A finished text and what it cost."""

    text: str
    tokens: list[int]
    stats: Stats
    seed: int


class LM:
    """A model ready to run, with its tokenizer."""

    def __init__(
        self, path: Path | str, model: Model, tokenizer: Callable[[], Tokenizer], kv: str, guard: GuardOptions
    ) -> None:
        self.path, self.model, self.kv = path, model, kv
        self.plan = Plan()
        self.profile: Profile | None = None
        self.guard = Guard(model, guard)
        self.drafting = Drafting()
        self.warnings: list[str] = []  # what a user should know of how it was loaded
        self._open_tokenizer = tokenizer
        self._tokens_made = 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self._open_tokenizer()
        if tokenizer.vocab_size > self.model.cfg.vocab:
            have, vocab = tokenizer.vocab_size, self.model.cfg.vocab
            raise RaloError(
                f"{self.path}: the tokenizer has {have} tokens, the model {vocab}: they do not belong together"
            )
        return tokenizer

    def use(self, plan: Plan, profile: Profile | None = None) -> None:
        """Runs with these modes from now on; an empty plan is dense."""
        profile = profile or self.profile
        check_layers(plan, self.model.cfg.n_layers)
        cfg, weights = self.model.cfg, self.model.weights
        model = profiles.fingerprint(weights)
        built = plan.build(views_of(cfg, weights, profile, model))
        self.model.use(built.slots, plan.in_prefill, built.pace, plan.verified)
        self.plan, self.profile = plan, profile
        self.guard.attach(plan.modes)

    @property
    def quant(self) -> str:
        return self.model.weights.quant

    @property
    def storage(self) -> str:
        """The precision, and what else weights are stored as."""
        others = {getattr(w, place).quant for w in self.model.weights.layers for place in PLACES} - {self.quant}
        return " and ".join([self.quant, *sorted(others)])

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_ids | frozenset(self.model.cfg.eos)

    def new_sequence(self) -> TextState:
        return TextState.empty(self.model.cfg, self.kv)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def request(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        *,
        stop: Sequence[str] = (),
        on_full: str = "stop",
        sampling: Sampling | None = None,
        **fields: Any,
    ) -> Request:
        """What `run` does, checked before any work. Sampling as a record, or by its fields (temperature=0, seed=1)."""
        if on_full not in ON_FULL:
            raise RaloError(f"on_full must be one of {', '.join(ON_FULL)}, got {on_full!r}")
        if max_tokens < 0:
            raise RaloError(f"max_tokens must not be negative, got {max_tokens}")
        if not prompt:
            raise RaloError("the prompt is empty: give some text to continue")
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab, limit = self.model.cfg.vocab, self.model.cfg.max_context
        if len(tokens) > limit:
            raise RaloError(f"the prompt is {len(tokens)} tokens, the model's context is {limit}: shorten it")
        if bad := [t for t in tokens if not 0 <= t < vocab]:
            raise RaloError(f"token {bad[0]} is not in the model's vocabulary of {vocab}")
        sampler = Sampler(sampling or Sampling(**fields))
        return Request(tokens, sampler, max_tokens, self.stop_ids, stop, on_full)

    def runner(self, sampler: Sampler) -> Runner:
        """What makes a text whose tokens `sampler` chooses: the model under guard, or drafts that are verified."""
        return Verified(self.model, self.drafting, sampler) if self.plan.verified else self.guard

    def run(self, request: Request, seq: TextState | None = None) -> Iterator[Piece]:
        """Tokens and text as they are made, after `seq` where one is given; `request.stats` tells what it cost."""
        seq = self.new_sequence() if seq is None else seq  # not `or`: an empty one is false
        for piece in generate(self.runner(request.sampler), seq, request, self.tokenizer.stream(after=request.prompt)):
            self._tokens_made += piece.token >= 0
            yield piece

    def stream(self, prompt: str | Sequence[int], max_tokens: int = 128, **options: Any) -> Iterator[str]:
        """Text as it is made; options as for `request`."""
        for piece in self.run(self.request(prompt, max_tokens, **options)):
            yield piece.text

    def generate(self, prompt: str | Sequence[int], max_tokens: int = 128, **options: Any) -> Generation:
        """The whole text at once; options as for `request`."""
        request = self.request(prompt, max_tokens, **options)
        pieces = list(self.run(request))
        text, tokens = "".join(p.text for p in pieces), [p.token for p in pieces if p.token >= 0]
        return Generation(text, tokens, request.stats, request.sampler.seed)

    def perplexity(self, text: str, ctx: int = 1024, tokens: int | None = None, first: int = 0) -> Quality:
        """Of at most `tokens` predictions, in windows of `ctx` without overlap, from position `first` of each on."""
        ids, ctx = self.encode(text), min(ctx, self.model.cfg.max_context)
        return perplexity(self.model, ids[: tokens + 1] if tokens else ids, ctx, self.kv, first=first)

    def metrics(self) -> dict[str, float | str]:
        """Counters since loading."""
        return {
            "tokens": self._tokens_made,
            "read_bytes": self.model.bytes_read,
            "weight_bytes": self.model.nbytes,
            "quant": self.quant,
            "isa": _core.level(),
            "threads": _core.threads(),
            **metrics.summed(self.model, self.guard),
        }

    def layer_metrics(self) -> list[dict[str, float]]:
        """What the modes counted, layer by layer."""
        return metrics.per_layer(self.model)


def load(
    model: str | Path = "mini",
    quant: str = "auto",
    kv: str = "f16",
    threads: int = 0,
    progress: Callable[[float], None] | None = None,
    *,
    modes: Sequence[Mode] = (),
    plan: str | Path = "",
    setup: Setup | None = None,
) -> LM:
    """A model by name or path; see LoadOptions for what each argument means.

    `modes`: as records, for example `[ralo.KWTA(k=0.5)]`; `plan`: a file of `ralo tune`; `setup`: both and more, as
    read from flags.
    """
    if sum(map(bool, (modes, plan, setup))) > 1:
        raise RaloError("of modes, plan and setup more than one is given: choose one")
    # What does not go together is said before any work.
    setup = setup or (read_plan(Path(plan)) if plan else Setup(compose(modes)))
    if quant not in ("auto", *QUANTS):
        raise RaloError(f"quant must be one of auto, {', '.join(QUANTS)}, got {quant!r}")
    if kv not in KV_KINDS:
        raise RaloError(f"kv must be one of {', '.join(KV_KINDS)}, got {kv!r}")
    cpu.setup(threads)
    cfg, weights, tokenizer = loader.load(str(model), quant, progress)
    lm = LM(model, Model(cfg, weights), tokenizer, kv, setup.guard)
    lm.warnings = plan_warnings(setup, profiles.fingerprint(weights), weights.quant)
    lm.use(setup.plan, _profile(model, setup, weights))
    return lm


def _profile(model: str | Path, setup: Setup, weights: Weights) -> Profile | None:
    """The profile that was asked for, or one that lies beside the model."""
    path = setup.profile or loader.where(str(model)) / profiles.NAME
    if not setup.profile and not path.is_file():
        return None
    profile = profiles.load(path)
    profile.check(weights, path)
    return profile
