"""Gates guessed by factors: only candidates are computed, several tokens have the same ones, what is missed shows."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_block import D, F, normal, packed, stream
from kernels.test_kwta_mlp import NORMS, QUANTS, Half, near, sizes
from reference import linear, neurons
from reference.rows import act, norm_rms

from ralo import _core
from ralo.matrix import Matrix
from ralo.modes.guess import factored
from ralo.tt.lowrank import Weighed
from ralo.tt.matrix import FactoredMatrix

RANK = 24  # of 40: guesses well, and still errs
KEEP = 14
CHECK = 16  # the first position whose guess is looked at
OPEN = {"name": "relu", "pick": "above", "amount": 0.0, "zeros": True}
TOP = {"name": "silu", "pick": "top", "amount": 12, "zeros": False}


class Guessed(Half):
    """An MLP whose gates are guessed, and who the candidates should be."""

    def __init__(
        self, quant: str = "f32", slack: float = 0.1, keep: int = 0, *, name: str = "relu", pick: str = "above",
        amount: float = 0.0, zeros: bool = True, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(quant, name, bias)
        self.slack, self.keep, self.rule = slack, keep, (pick, amount)
        gate = linear.unpack(self.up.quant, self.up.data, self.up.scales)[self.up.slices["gate"]].T  # (D, F)
        first, second = Weighed.of(gate, np.eye(D)).factors(RANK)
        known = first.astype(np.float16), second.astype(np.float16)
        self.factors = factored(known, RANK, "int8" if quant == "int4" else quant)
        up = _core.neuron_rows(self.up.core, self.up.slices["up"].start, F)
        self.args = (self.up.quant, D, F, *up, NORMS, 1, pick, amount, 1.0, 1, False, zeros)
        self.plain = _core.KwtaMlp(*self.args)
        self.slot = _core.KwtaMlp(*self.args, self.guess(self.factors))
        self.mlp.use(None, None, self.slot)

    def guess(self, factors: FactoredMatrix) -> _core.RankGuess:
        rows = _core.neuron_rows(self.up.core, self.up.slices["gate"].start, F)
        return _core.RankGuess(factors.core, self.up.quant, D, F, *rows, self.slack, self.keep)

    def without(self, x: np.ndarray, past: int = 0) -> np.ndarray:
        """The same without a guess."""
        self.mlp.use(None, None, self.plain)
        y, _ = self.run(x, past, _core.LayerState())
        self.mlp.use(None, None, self.slot)
        return y

    def candidates(self, x: np.ndarray) -> np.ndarray:
        bias = 0 if self.up.bias is None else self.up.bias[self.up.slices["gate"]]
        guess = norm_rms(x[0, :D], self.weight, 1e-5) @ self.factors.unpack()[:, :F] + bias
        if self.keep:
            return neurons.top(np.abs(act(self.name, guess) * NORMS), self.keep)
        return np.flatnonzero(guess + self.slack > 0)

    def likely(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Winners among all gates, and among those of candidates."""
        score, some = np.abs(act(self.name, self.gated(x)[0]) * NORMS), np.zeros(F)
        at = self.candidates(x)
        some[at] = score[at]
        if self.rule[0] == "above":
            return np.flatnonzero(score), np.flatnonzero(some)
        return neurons.top(score, int(self.rule[1])), neurons.top(some, int(self.rule[1]))


WAYS = [OPEN, TOP | {"keep": KEEP}]
ids = pytest.mark.parametrize("way", WAYS, ids=["slack", "keep"])


@ids
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("past", [0, CHECK])
def test_only_candidates_win(level, threads, quant, bias, past, way):
    half, x = Guessed(quant, bias=bias, **way), stream(1)
    got, _ = half.run(x, past, _core.LayerState())
    near(got, half.want(x, half.likely(x)[1]), 2e-4)
    counts = half.slot.counts()
    assert (counts["guessed"], counts["candidates"]) == (F, len(half.candidates(x)))
    assert counts["kept"] < counts["candidates"] < F


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("quant", QUANTS)
def test_with_all_as_candidates_it_is_gate_first(level, quant, tokens):
    for way in (OPEN | {"slack": 1e9}, TOP | {"keep": F}):
        half, x = Guessed(quant, **way), stream(tokens)
        got, _ = half.run(x, 0, _core.LayerState())
        assert half.slot.counts()["candidates"] == tokens * F
        if tokens > 1:  # the same gates
            assert np.array_equal(got, half.without(x))
        for t in range(tokens):
            near(got[t], half.without(x)[t])


@ids
@pytest.mark.parametrize("quant", QUANTS)
def test_many_tokens_are_as_one_by_one(level, quant, way):
    """The same candidates to the last one: a few at a time get the bits that they get alone."""
    half, alone, x, state = Guessed(quant, **way), Guessed(quant, **way), stream(19), _core.LayerState()
    together, _ = half.run(x, 2, _core.LayerState())
    for t in range(19):
        near(alone.run(x[t : t + 1], 2 + t, state)[0], together[t], 2e-4)
    many, one_by_one = half.slot.counts(), alone.slot.counts()
    same = ("steps", "channels", "kept", "guessed", "candidates", "checked", "missed")
    assert [many[name] for name in same] == [one_by_one[name] for name in same]
    assert many["checked"] > 0 and many["bytes_read"] == many["bytes_skipped"] == 0 < one_by_one["bytes_read"]


@ids
def test_what_candidates_miss_is_counted(level, way):
    way = way if "keep" in way else way | {"slack": -0.4}
    half, state, x = Guessed(**way), _core.LayerState(), stream(1)
    for past in (0, CHECK - 1, CHECK + 1):
        half.run(x, past, state)
    assert half.slot.counts()["checked"] == 0
    before = half.run(x, CHECK + 1, state)[0]
    assert np.array_equal(half.run(x, CHECK, state)[0], before), "a look changes nothing"
    half.run(x, CHECK + 64, state)
    won, counts = half.likely(x)[0], half.slot.counts()
    missed = np.setdiff1d(won, half.candidates(x))
    assert len(missed) and (counts["checked"], counts["missed"]) == (2 * len(won), 2 * len(missed))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("past", [0, CHECK])
def test_counts_are_the_bytes_read(level, quant, past):
    half, x = Guessed(quant), stream(1)
    _, read = half.run(x, past, _core.LayerState())
    counts, (up, down) = half.slot.counts(), sizes(half)
    gates = F if past == CHECK else int(counts["candidates"])
    assert read == half.factors.nbytes + gates * up + counts["kept"] * (up + down) == counts["bytes_read"]
    assert counts["bytes_skipped"] == half.run(x)[1] - read


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_guess_that_is_not_finite_is_caught(level, tokens):
    half, x, state = Guessed("int8"), stream(tokens), _core.LayerState()
    clean, (first, second) = half.run(x, 0, state)[0], half.factors.steps
    dense = half.run(x)
    scales = second.scales.copy()
    scales[0, 0] = 0x7FC0  # NaN
    broken = Matrix("int8", second.ic, second.parts, second.data, scales, None)
    factors = FactoredMatrix(D, {"gate": F}, half.factors.train, [first, broken], None)
    sick = _core.KwtaMlp(*half.args, half.guess(factors))
    half.mlp.use(None, None, sick)
    got, read = half.run(x, 0, state)
    assert np.array_equal(got, dense[0]) and sick.nonfinite == 1
    if tokens == 1:
        assert sick.counts()["bytes_skipped"] == dense[1] - read == -factors.nbytes
    half.mlp.use(None, None, half.slot)
    assert np.array_equal(half.run(x, 0, state)[0], clean) and half.slot.nonfinite == 0


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_planted_nan_is_caught(level, tokens):
    half, x, state = Guessed("int8"), stream(tokens), _core.LayerState()
    half.slot.plant = True
    got, read = half.run(x, 0, state)
    assert np.array_equal(got, half.run(x)[0]) and half.slot.nonfinite == 1 and not half.slot.plant
    if tokens == 1:
        assert half.slot.counts()["bytes_skipped"] == half.run(x)[1] - read < 0


@pytest.mark.parametrize("tokens", [1, 5])
def test_beside_a_slot_in_front_of_up_nothing_is_guessed(level, tokens):
    half, x = Guessed("int8"), stream(tokens)
    results = []
    for slot in (half.slot, half.plain):
        some = _core.KwtaInput(D, None, 1, "top", 20, 1.0, 1, False, False)
        half.mlp.use(some, None, slot)
        results.append(half.run(x, 0, _core.LayerState()))
    assert np.array_equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert half.slot.counts() == half.plain.counts() and half.slot.counts()["guessed"] == 0


def test_guesses_that_do_not_fit_are_refused():
    half = Guessed("int8")
    core, rows = half.factors.core, _core.neuron_rows(half.up.core, 0, F)
    other = packed({"gate": normal(F, D + 1), "up": normal(F, D + 1)}, "int8")
    held = (*half.args[:10], 2, *half.args[11:])
    cases = [
        ("f outputs for d inputs", lambda: _core.RankGuess(other.core, "int8", D, F, *rows, 0.0)),
        ("data must be", lambda: _core.RankGuess(core, "int8", D, F + 1, *rows, 0.0)),
        ("have scales", lambda: _core.RankGuess(core, "int8", D, F, rows[0], None, 0.0)),
        ("slack must be", lambda: _core.RankGuess(core, "int8", D, F, *rows, float("nan"))),
        ("cannot be held", lambda: _core.KwtaMlp(*held, half.guess(half.factors))),
        ("another gate", lambda: _core.KwtaMlp(*half.args, Guessed("int4").guess(Guessed("int4").factors))),
    ]
    for message, case in cases:
        with pytest.raises(ValueError, match=message):
            case()
