"""The pack that is healed: opened with all it needs to be written again, beside its teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ralo import loader
from ralo.config import ModelConfig
from ralo.errors import RaloError
from ralo.formats import packed
from ralo.formats.checkpoint import Checkpoint
from ralo.heal.job import Result
from ralo.heal.takeout import plain_model
from ralo.heal.writeback import written_back
from ralo.matrix import QUANTS
from ralo.profile import fingerprint
from ralo.remake.about import About
from ralo.weights import Progress, Weights


@dataclass(frozen=True)
class Pack:
    path: Path
    ckpt: Checkpoint  # its config and tokenizer
    about: About | None  # what it says of weights that were made for it
    cfg: ModelConfig
    weights: Weights

    @classmethod
    def open(cls, path: Path) -> Pack:
        ckpt, about = packed.reopened(path)
        cfg, weights, _ = packed.open_directory(path, "auto")
        return cls(path, ckpt, about, cfg, weights)

    def digest(self) -> str:
        """Stands for its weights: a result must come back to the same."""
        return plain_model(self.cfg, self.weights, 1).digest()

    def teacher(self, name: str, progress: Progress | None) -> tuple[ModelConfig, Weights]:
        """The dense model, as exact as its weights are; it must be the one that the pack was made from."""
        fine = "f32" if self.weights.quant == "f32" else "bf16"
        cfg, weights, _ = loader.load(name, "auto" if packed.is_packed(loader.where(name)) else fine, progress)
        if any(m.quant not in QUANTS for m in weights.matrices().values()):
            raise RaloError(f"{name}: has weights that were made for a pack; the teacher is the dense model")
        if fingerprint(weights) != (self.about.model if self.about else fingerprint(self.weights)):
            raise RaloError(f"{name}: is another model than the one that {self.path} was made from")
        return cfg, weights

    def write(self, to: Path, result: Result) -> Weights:
        """A pack with what was learned; its weights."""
        weights = written_back(self.weights, result.trained)
        about = self.about
        if about is not None:
            matrices = weights.matrices()
            records = {name: about.record(matrices[name]) for name in about.matrices}
            about = replace(about, settings={**about.settings, "healed": figures(result)}, matrices=records)
        packed.save(self.ckpt, weights, to, about)
        return weights


def figures(result: Result) -> Mapping[str, float]:
    """What is told of a training."""
    r = result.record
    return {
        "tokens": r.tokens,
        "seconds": round(r.seconds, 1),
        "steps": r.steps,
        "lr": result.settings.lr,
        "kl_before": r.kl_before,
        "kl_after": r.kl_after,
    }
