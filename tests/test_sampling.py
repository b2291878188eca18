"""How tokens are chosen: each limit against its plain definition, repeatable and with the right frequencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ralo import RaloError, Sampling
from ralo.sampling import PENALTY_WINDOW, Sampler

F32 = NDArray[np.float32]
GRID = 4000
SCORES = np.random.default_rng(5).normal(0, 2, 40).astype(np.float32)


class Sweep:
    """In place of random numbers: a walk through [0, 1) in equal steps, so that shares come out exactly."""

    def __init__(self) -> None:
        self.at = -1

    def random(self) -> float:
        self.at += 1
        return (self.at + 0.5) / GRID


def shares(scores: F32, options: Sampling, recent: Sequence[int] = ()) -> dict[int, float]:
    sampler = Sampler(options)
    sampler._random = Sweep()  # type: ignore[assignment]
    counts = Counter(sampler(scores, recent) for _ in range(GRID))
    return {token: count / GRID for token, count in counts.items()}


def defined(scores: F32, options: Sampling) -> dict[int, float]:
    """Top-k of the scores, then min-p and top-p of their probabilities, written as their papers say."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if options.top_k:
        order = order[: options.top_k]
    weights = [np.exp((float(scores[token]) - float(scores[order[0]])) / options.temperature) for token in order]
    order = [token for token, weight in zip(order, weights, strict=True) if weight >= options.min_p * max(weights)]
    weights = weights[: len(order)]
    kept, mass = 0, 0.0
    while kept < len(order) and (kept == 0 or mass < options.top_p):
        mass += weights[kept] / sum(weights)
        kept += 1
    return {token: weight / sum(weights[:kept]) for token, weight in zip(order[:kept], weights[:kept], strict=True)}


def assert_as_defined(scores: F32, options: Sampling) -> None:
    want, got = defined(scores, options), shares(scores, options)
    assert got.keys() <= want.keys()
    for token, share in want.items():
        assert got.get(token, 0.0) == pytest.approx(share, abs=2 / GRID), (token, options)


@pytest.mark.parametrize(
    "limit",
    [
        *({"top_k": k} for k in (2, 5, 39, 40, 1000)),
        *({"top_p": p} for p in (0.0, 0.1, 0.5, 0.9, 0.999)),
        *({"min_p": p} for p in (0.01, 0.3, 1.0)),
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.3},
        {"temperature": 5.0, "top_p": 0.7},
    ],
)
def test_limits_are_as_defined(limit: dict[str, float]) -> None:
    assert_as_defined(SCORES, Sampling(**{"temperature": 1.0, "top_p": 1.0} | limit))


@pytest.mark.parametrize("seed", range(30))
def test_limits_together(seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = random.normal(0, random.uniform(0.1, 5), random.integers(1, 30)).astype(np.float32)
    limits = {"top_p": random.uniform(0, 1), "min_p": random.uniform(0, 0.3), "top_k": int(random.integers(2, 30))}
    assert_as_defined(scores, Sampling(temperature=random.uniform(0.1, 3), **limits))


def chi_square(seed: int, drawn_at: float, expected_at: float, draws: int = 20000) -> float:
    scores = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], np.float32)
    sampler = Sampler(Sampling(temperature=drawn_at, top_p=1.0, seed=seed))
    counts = np.bincount([sampler(scores) for _ in range(draws)], minlength=8)
    expected = np.exp(scores.astype(np.float64) / expected_at)
    expected *= draws / expected.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_temperature(temperature: float) -> None:
    limit = 24.3  # of chi-square with 7 degrees of freedom, passed once in 1000 times by chance
    assert chi_square(1, temperature, temperature) < limit
    assert chi_square(1, temperature, temperature * 1.1) > limit


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_frequencies_without_limits(temperature: float, seed: int) -> None:
    """Tokens are not in the order of their scores there; the likeliest are last, first, and in the middle."""
    scores = np.array([1.0, -2.0, 0.0, 2.0, -1.0, 0.5, -0.5, 1.5, -np.inf, 2.5], np.float32)
    draws, sampler = 20000, Sampler(Sampling(temperature=temperature, top_p=1.0, seed=seed))
    counts = np.bincount([sampler(scores) for _ in range(draws)], minlength=10)
    expected = np.exp(scores.astype(np.float64) / temperature)
    expected *= draws / expected.sum()
    there = expected > 0
    assert counts[8] == 0 and ((counts - expected)[there] ** 2 / expected[there]).sum() < 26.1  # once in 1000 times


@pytest.mark.parametrize("limit", [{"top_k": 40}, {"top_k": 1000}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_limits_that_limit_nothing(limit: dict[str, float]) -> None:
    """No token is lost and none is sorted away: the shares are those of no limit."""
    free = Sampling(temperature=1.0, top_p=1.0)
    assert shares(SCORES, Sampling(**{"temperature": 1.0, "top_p": 1.0} | limit)) == shares(SCORES, free)
    assert_as_defined(SCORES, free)


def test_seeds() -> None:
    draws = {seed: [Sampler(Sampling(seed=seed, top_p=1.0))(SCORES) for _ in range(1)] for seed in range(40)}
    assert len({tuple(drawn) for drawn in draws.values()}) > 5
    first, again = (Sampler(Sampling(seed=7)) for _ in range(2))
    assert [first(SCORES) for _ in range(50)] == [again(SCORES) for _ in range(50)]
    unnamed = Sampler(Sampling())
    replay = Sampler(Sampling(seed=unnamed.seed))
    assert [unnamed(SCORES) for _ in range(50)] == [replay(SCORES) for _ in range(50)]
    assert Sampler(Sampling()).seed != unnamed.seed


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_greedy_in_all_its_spellings(options: dict[str, float]) -> None:
    sampler = Sampler(Sampling(**options))
    assert {sampler(SCORES) for _ in range(30)} == {int(np.argmax(SCORES))}


def test_ties() -> None:
    flat = np.zeros(6, np.float32)
    assert Sampler(Sampling(temperature=0))(flat) == 0
    assert Sampler(Sampling(top_k=1))(flat) == 0
    assert shares(flat, Sampling(min_p=1.0, top_p=1.0)) == pytest.approx(dict.fromkeys(range(6), 1 / 6), abs=1 / GRID)
    assert len(shares(flat, Sampling(top_k=3, top_p=1.0))) == 3
    assert len(shares(flat, Sampling(top_p=0.5))) == 3


def test_tokens_with_no_chance_are_never_chosen() -> None:
    """Also where the random number is the last one below 1 and sums round."""
    scores = np.random.default_rng(0).normal(0, 1, 5000).astype(np.float32)
    scores[1::2] = -np.inf
    for size in range(2, 5000, 97):
        sampler = Sampler(Sampling(temperature=1.0, top_p=1.0))
        sampler._random = type("Last", (), {"random": lambda self: np.nextafter(1.0, 0.0)})()
        assert np.isfinite(scores[sampler(scores[:size])])
    assert shares(np.array([-np.inf, 3, -np.inf], np.float32), Sampling(top_p=1.0)) == {1: 1.0}


def test_repeat_penalty_is_relative() -> None:
    scores = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    assert Sampler(Sampling(temperature=0, repeat_penalty=1.2))(scores, [0]) == 1
    assert Sampler(Sampling(temperature=0, repeat_penalty=1.2))(scores, [1, 0, 0]) == 0
    assert Sampler(Sampling(temperature=0, repeat_penalty=1.2))(scores[2:], [0]) == 1  # a negative one goes down too
    assert Sampler(Sampling(temperature=0, repeat_penalty=0.5))(scores, [1]) == 1
    want = shares(np.array([2 / 1.2, 1.9, -1.2, -1.1], np.float32), Sampling(top_p=1.0))
    assert shares(scores, Sampling(top_p=1.0, repeat_penalty=1.2), [0, 2, 0]) == want


def test_presence_penalty_is_absolute() -> None:
    scores = np.array([2.0, 1.9, -1.0], np.float32)
    want = shares(np.array([1.5, 1.9, -1.5], np.float32), Sampling(top_p=1.0))
    assert shares(scores, Sampling(top_p=1.0, presence_penalty=0.5), [0, 2, 2, 2]) == want
    assert scores[0] == 2.0  # the model's own scores are left alone


def test_frequency_penalty_counts() -> None:
    scores = np.array([2.0, 1.9, -1.0, 0.5], np.float32)
    want = shares(np.array([2.0 - 0.25, 1.9, -1.0 - 0.75, 0.5], np.float32), Sampling(top_p=1.0))
    assert shares(scores, Sampling(top_p=1.0, frequency_penalty=0.25), [0, 2, 2, 2]) == want
    assert scores[2] == -1.0  # the model's own scores are left alone
    liked = Sampler(Sampling(temperature=0, frequency_penalty=-0.5))
    assert [liked(scores, [3] * n) for n in (1, 2, 3, 4)] == [0, 0, 0, 3]


small = st.floats(-2, 2, width=32)


@given(
    scores=st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8),
    recent=st.lists(st.integers(0, 7), max_size=2 * PENALTY_WINDOW),
    repeat=st.floats(0.5, 2.0),
    presence=small,
    frequency=small,
)
@settings(deadline=None)
def test_penalties_are_as_defined(
    scores: list[float], recent: list[int], repeat: float, presence: float, frequency: float
) -> None:
    options = Sampling(repeat_penalty=repeat, presence_penalty=presence, frequency_penalty=frequency)
    given_scores = np.array(scores, np.float32)
    want = given_scores.astype(np.float64)
    for token in set(recent[-PENALTY_WINDOW:]):
        want[token] = want[token] / repeat if want[token] > 0 else want[token] * repeat
        want[token] -= presence + frequency * recent[-PENALTY_WINDOW:].count(token)
    if recent:
        np.testing.assert_allclose(Sampler(options)._penalised(given_scores, recent), want, rtol=1e-5, atol=1e-4)
    chosen = Sampler(Sampling(**{**vars(options), "temperature": 0}))(given_scores, recent)
    assert want[chosen] >= want.max() - 1e-3


def test_penalties_look_at_the_latest_tokens_only() -> None:
    scores = np.array([2.0, 1.9, 0.0], np.float32)
    sampler = Sampler(Sampling(temperature=0, presence_penalty=1.0))
    assert sampler(scores, [0] + [2] * (PENALTY_WINDOW - 1)) == 1
    assert sampler(scores, [0] + [2] * PENALTY_WINDOW) == 0
    assert sampler(scores, []) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[1.0, np.nan], [np.inf, 1.0], [-np.inf, -np.inf], [np.nan, np.nan]])
def test_scores_that_are_no_numbers(bad: list[float], temperature: float) -> None:
    with pytest.raises(RaloError, match="damaged"):
        Sampler(Sampling(temperature=temperature))(np.array(bad, np.float32))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": t} for t in (-0.1, 11.0, float("nan"))),
        *({"top_p": -1.0}, {"top_p": 1.5}, {"min_p": 2.0}, {"top_k": -1}),
        *({"repeat_penalty": 0.0}, {"presence_penalty": float("inf")}, {"seed": -2}),
        *({"frequency_penalty": f} for f in (-10.1, 11.0, float("nan"))),
    ],
)
def test_values_out_of_range(wrong: dict[str, float]) -> None:
    [name] = wrong
    with pytest.raises(RaloError, match=f"{name} must be a number from"):
        Sampling(**wrong)
