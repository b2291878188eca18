"""What calibration learned of a model: per layer and place its inputs, its weights' norms, and what skipping costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ralo.errors import FormatError, RaloError
from ralo.formats import safetensors
from ralo.weights import PLACES, Weights

F32 = NDArray[np.float32]
Guess = tuple[NDArray[np.float16], NDArray[np.float16]]  # factors (D, R) and (R, F) of a gate
FORMAT = 3
NAME = "profile.safetensors"  # beside a model, found by itself


@dataclass(frozen=True)
class Place:
    """One place of one layer. A score is |x| times the norm of the channel's weights."""

    norms: F32  # (ic)
    moments: F32  # (2, ic): mean of x, mean of x squared
    quantiles: F32  # (Q): of the scores of all channels, from the smallest to the largest
    kl: F32  # (2, levels): share kept, mean KL from dense with only this place reading less
    half: F32 = field(default_factory=lambda: np.empty(0, np.float32))  # (1): the same with half of most channels'
    # bits; (0) where weights are not int8

    def quantile(self, q: float) -> float:
        return float(np.interp(q, np.linspace(0, 1, len(self.quantiles)), self.quantiles))


@dataclass(frozen=True)
class Profile:
    """Calibration of one model on one text; `seconds` are of the machine it was made on."""

    model: str  # fingerprint of the weights it is for
    tokens: int
    places: Mapping[tuple[int, str], Place]
    seconds: Mapping[str, F32] = field(default_factory=dict)  # place -> (2, levels): share kept, time of one matvec
    halved: Mapping[str, F32] = field(default_factory=dict)  # the same with half of most channels' bits; may be none
    tiled: Mapping[str, float] = field(default_factory=dict)  # place -> time of all channels so, in tiles; may be none
    head: F32 = field(default_factory=lambda: np.empty(0, np.float32))  # (2): time of the head, dense and by halves;
    # (0) where it has none
    winners: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict)  # layer -> (tokens, F / 8): neurons that won
    gates: Mapping[int, F32] = field(default_factory=dict)  # layer -> (Q): quantiles of |act(gate)|
    inputs: Mapping[int, F32] = field(default_factory=dict)  # layer -> (tokens, D): a few inputs of its MLP
    guesses: Mapping[int, Guess] = field(default_factory=dict)  # layer -> factors of its gate

    def check(self, weights: Weights, source: object) -> None:
        fits = all(
            (p := self.places.get((i, place))) is not None and p.norms.shape == (getattr(layer, place).ic,)
            for i, layer in enumerate(weights.layers)
            for place in PLACES
        )
        if not fits or self.model != fingerprint(weights):
            raise RaloError(f"{source}: is the profile of another model; make one with ralo calibrate")

    def save(self, path: Path) -> None:
        arrays: dict[str, NDArray[np.generic]] = {}
        for (layer, place), p in self.places.items():
            for name in ("norms", "moments", "quantiles", "kl", "half"):
                arrays[f"layers.{layer}.{place}.{name}"] = getattr(p, name)
        arrays |= {f"seconds.{place}": a for place, a in self.seconds.items()}
        arrays |= {f"halved.{place}": a for place, a in self.halved.items()}
        arrays |= {f"tiled.{place}": np.array([a], np.float32) for place, a in self.tiled.items()}
        arrays |= {f"layers.{layer}.winners": a for layer, a in self.winners.items()}
        arrays |= {f"layers.{layer}.gates": a for layer, a in self.gates.items()}
        arrays |= {f"layers.{layer}.inputs": a for layer, a in self.inputs.items()}
        for layer, (first, second) in self.guesses.items():
            arrays |= {f"layers.{layer}.guess_first": first, f"layers.{layer}.guess_second": second}
        if self.head.size:
            arrays["head"] = self.head
        about = {"format": FORMAT, "model": self.model, "tokens": self.tokens}
        safetensors.write_file(path, arrays, {"ralo_profile": json.dumps(about)})


def load(path: Path) -> Profile:
    about = safetensors.metadata(path)
    tensors = {name: np.array(t.stored()) for name, t in safetensors.open_file(path).items()}
    try:
        info = json.loads(about["ralo_profile"])
        if info["format"] != FORMAT:
            raise FormatError(
                path,
                f"is a profile of format {info['format']}, this ralo reads {FORMAT}; make it anew with ralo calibrate",
            )
        parts: dict[tuple[int, str], dict[str, F32]] = {}
        seconds, halved, tiled, winners, gates, inputs = {}, {}, {}, {}, {}, {}
        by_head = np.empty(0, np.float32)
        factors: dict[str, dict[int, NDArray[np.float16]]] = {"guess_first": {}, "guess_second": {}}
        for name, array in tensors.items():
            head, *rest = name.split(".")
            if name == "head":
                by_head = array
            elif head == "seconds":
                seconds[rest[0]] = array
            elif head == "halved":
                halved[rest[0]] = array
            elif head == "tiled":
                tiled[rest[0]] = float(array[0])
            elif rest[1] == "winners":
                winners[int(rest[0])] = array
            elif rest[1] == "gates":
                gates[int(rest[0])] = array
            elif rest[1] == "inputs":
                inputs[int(rest[0])] = array
            elif rest[1] in factors:
                factors[rest[1]][int(rest[0])] = array
            else:
                parts.setdefault((int(rest[0]), rest[1]), {})[rest[2]] = array
        places = {key: Place(**arrays) for key, arrays in parts.items()}
        guesses = {layer: (first, factors["guess_second"][layer]) for layer, first in factors["guess_first"].items()}
        return Profile(
            info["model"], info["tokens"], places, seconds, halved, tiled, by_head, winners, gates, inputs, guesses
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FormatError(path, "is not a profile; make one with ralo calibrate") from error


def fingerprint(weights: Weights) -> str:
    """The same for every precision a model is packed in, another after any training: norms and some embeddings."""
    digest = hashlib.blake2b(digest_size=16)
    for layer in weights.layers:
        digest.update(layer.attn_norm.weight.tobytes() + layer.mlp_norm.weight.tobytes())
    digest.update(np.ascontiguousarray(weights.embed.table[:: max(1, len(weights.embed.table) // 64)]).tobytes())
    return digest.hexdigest()
