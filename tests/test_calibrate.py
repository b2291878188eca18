"""Calibration: what it saw is what was there, it is saved and read back, and a profile of another model is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commandline import refused
from reference import linear
from tiny import write_hf

import ralo
from ralo import KWTA, RaloError, _core, autotune, texts
from ralo import profile as profiles
from ralo.autotune import tune_k
from ralo.calibrate import Far, calibrate
from ralo.compose import compose
from ralo.formats import safetensors
from ralo.memory import Arena
from ralo.modes.base import LayerSlots
from ralo.modes.share import FINE
from ralo.plan import Setup
from ralo.quality import Quality
from ralo.sequence import Sequence
from ralo.weights import PLACES

TOKENS = np.random.default_rng(4).integers(2, 97, 101).tolist()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("calibrate") / "tiny", "llama")


@pytest.fixture(scope="module")
def lm(directory):
    return ralo.load(directory, "f32")


@pytest.fixture(scope="module")
def profile(lm):
    return calibrate(lm, TOKENS, 50)


def inputs(lm, layer: int, place: str) -> np.ndarray:
    """Through a tap, in one pass."""
    tap = _core.Tap(getattr(lm.model.weights.layers[layer], place).ic)
    slots = [LayerSlots() for _ in lm.model.layers]
    slots[layer].put(place, tap, "test", "")
    lm.model.use(slots)
    lm.model.forward(TOKENS[:-1], Sequence.empty(lm.model.cfg), exact=False)
    lm.use(compose([]))
    return tap.take()


@pytest.mark.parametrize("place", PLACES)
def test_what_it_saw(lm, profile, place):
    x, found = inputs(lm, 1, place), profile.places[1, place]
    matrix = getattr(lm.model.weights.layers[1], place)
    norms = np.sqrt((linear.unpack("f32", matrix.data, None) ** 2).sum(axis=0))
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    np.testing.assert_allclose(found.moments[0], x.mean(axis=0), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found.moments[1], (x**2).mean(axis=0), rtol=1e-3)
    scores = np.abs(x * norms)
    for q in (0.1, 0.5, 0.9):
        assert (scores < found.quantile(q)).mean() == pytest.approx(q, abs=0.03)
    assert (found.kl[1] > 0).all() and found.kl[1][0] > found.kl[1][-1]
    assert profile.winners[1].shape == (100, 96 // 8)
    assert np.unpackbits(profile.winners[1]).mean() == pytest.approx(0.5, abs=0.02)


def test_what_the_gates_let_through(lm, profile):
    up = lm.model.weights.layers[1].up
    gate = inputs(lm, 1, "up") @ linear.unpack("f32", up.data, None)[up.slices["gate"]].T
    size = np.abs(gate / (1 + np.exp(-gate)))
    for q in (0.1, 0.5, 0.9):
        bound = profile.gates[1][round(q * (len(profile.gates[1]) - 1))]
        assert (size < bound).mean() == pytest.approx(q, abs=0.03)


def test_some_inputs_of_mlps_are_kept(lm, profile):
    x = inputs(lm, 1, "up")
    assert len(profile.inputs[1]) == 100  # of a text that is shorter than what is kept
    for row in profile.inputs[1]:
        assert np.abs(x - row).max(axis=1).min() < 1e-5


def test_it_leaves_the_model_as_it_was(directory):
    lm = ralo.load(directory, "f32", modes=[KWTA(k=0.5)])
    before = lm.model.step(5, lm.new_sequence())
    calibrate(lm, TOKENS[:40], 20)
    assert np.array_equal(lm.model.step(5, lm.new_sequence()), before)


def test_saved_and_read_back(profile, lm, tmp_path):
    profile.save(tmp_path / "a.profile")
    again = profiles.load(tmp_path / "a.profile")
    assert (again.model, again.tokens, again.places.keys()) == (profile.model, 100, profile.places.keys())
    for key, place in profile.places.items():
        for name in ("norms", "moments", "quantiles", "kl"):
            assert np.array_equal(getattr(place, name), getattr(again.places[key], name))
    assert all(np.array_equal(profile.seconds[p], again.seconds[p]) for p in PLACES)
    assert all(np.array_equal(profile.winners[i], again.winners[i]) for i in range(2))
    assert all(np.array_equal(profile.gates[i], again.gates[i]) for i in range(2))
    assert all(np.array_equal(profile.inputs[i], again.inputs[i]) for i in range(2))
    assert profile.halved == profile.tiled == again.halved == again.tiled == {} and again.head.size == 0
    assert all(place.half.size == 0 for place in again.places.values()), "weights of other precisions have none"
    again.check(lm.model.weights, "it")


@pytest.fixture(scope="module")
def of_int8(directory):
    return calibrate(ralo.load(directory, "int8"), TOKENS, 50)


def test_what_is_known_of_halves_is_saved_and_read_back(of_int8, tmp_path):
    of_int8.save(tmp_path / "a.profile")
    again = profiles.load(tmp_path / "a.profile")
    assert set(of_int8.halved) == set(again.halved) == set(of_int8.tiled) == set(again.tiled) == set(PLACES)
    for place in PLACES:
        assert again.halved[place].shape == (2, 4) and np.array_equal(again.halved[place], of_int8.halved[place])
        assert isinstance(again.tiled[place], float) and again.tiled[place] == np.float32(of_int8.tiled[place])
    assert again.head.shape == (2,) and np.array_equal(again.head, of_int8.head)
    for key, place in of_int8.places.items():
        assert place.half.shape == (1,) and np.array_equal(again.places[key].half, place.half)
    replace(again, tiled={"up": 0.25}).save(tmp_path / "b.profile")
    assert profiles.load(tmp_path / "b.profile").tiled == {"up": 0.25}


def test_what_halves_cost(directory, of_int8):
    """As tiles of one place, everything else dense."""
    lm = ralo.load(directory, "int8")
    for key in ((0, "qkv"), (1, "down")):
        matrix = getattr(lm.model.weights.layers[key[0]], key[1])
        fine = max(1, round(FINE * matrix.ic))
        slots = [LayerSlots() for _ in lm.model.layers]
        tiles = _core.KwtaTiles(matrix.ic, of_int8.places[key].norms, matrix.tiles(Arena()), fine)
        slots[key[0]].put(key[1], tiles, "test", "")
        lm.model.use(slots)
        found = Far(lm, TOKENS[:51]).kl()
        assert of_int8.places[key].half[0] == pytest.approx(found) and found > 0


def test_every_precision_has_one_fingerprint_and_another_model_another(directory, lm, tmp_path):
    own = profiles.fingerprint(lm.model.weights)
    assert profiles.fingerprint(ralo.load(directory, "int4").model.weights) == own
    other = ralo.load(write_hf(tmp_path / "other", "llama", seed=1), "f32")
    assert profiles.fingerprint(other.model.weights) != own


def test_a_profile_of_another_model_is_refused(profile, tmp_path):
    path = tmp_path / "a.profile"
    profile.save(path)
    other = write_hf(tmp_path / "other", "llama", seed=1)
    with pytest.raises(RaloError, match=r"a\.profile: is the profile of another model; make one with ralo calibrate"):
        ralo.load(other, setup=Setup(compose([KWTA()]), profile=path))


def test_a_profile_beside_the_model_is_found(profile, tmp_path):
    directory = write_hf(tmp_path / "model", "llama")
    profile.save(directory / profiles.NAME)
    assert ralo.load(directory, "f32").profile is not None


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({}, "is not a profile"),
        ({"ralo_profile": "{"}, "is not a profile"),
        ({"ralo_profile": "[]"}, "is not a profile"),
        ({"ralo_profile": '{"format": 9}'}, "is a profile of format 9, this ralo reads 3"),
    ],
)
def test_files_that_are_none(tmp_path: Path, notes: dict[str, str], message: str) -> None:
    safetensors.write_file(tmp_path / "a", {"x": np.zeros(3, np.float32)}, notes)
    with pytest.raises(RaloError, match=message):
        profiles.load(tmp_path / "a")


def test_an_older_profile_is_refused_in_one_line(profile, tmp_path, monkeypatch, capsys):
    """It says nothing of tiles, and its places by halves were measured as lists."""
    model, path = write_hf(tmp_path / "model", "llama"), tmp_path / "old.profile"
    with monkeypatch.context() as before:
        before.setattr(profiles, "FORMAT", 2)
        profile.save(path)
    line = refused(capsys, "run", "-m", model, "-p", "a", "-n", "1", "--kwta=on", "--profile", path)
    assert line == f"ralo run: {path}: is a profile of format 2, this ralo reads 3; make it anew with ralo calibrate"


def test_an_array_that_is_missing_or_too_much_is_no_profile(of_int8, tmp_path):
    of_int8.save(tmp_path / "a")
    arrays = {name: np.array(t.stored()) for name, t in safetensors.open_file(tmp_path / "a").items()}
    for name, changed in {
        "layers.0.up.kl": None,
        "tiled.up": np.zeros(0, np.float32),
        "tiled": np.zeros(1, np.float32),
    }.items():
        kept = {**arrays, name: changed} if changed is not None else {n: a for n, a in arrays.items() if n != name}
        safetensors.write_file(tmp_path / "b", kept, safetensors.metadata(tmp_path / "a"))
        with pytest.raises(RaloError, match="is not a profile; make one with ralo calibrate"):
            profiles.load(tmp_path / "b")


def test_tuning_stays_within_the_budget(lm, profile, monkeypatch):
    monkeypatch.setattr(autotune, "fastest", lambda lm, mode, profile, ks: ks[0])  # the least that is good enough
    for budget in (0.05, 0.5):
        tuned = tune_k(lm, KWTA(), profile, TOKENS, budget)
        assert tuned.quality.delta_ppl_pct <= budget
        worse = [q for k, q in tuned.tried if k < tuned.mode.k]
        assert all(q.delta_ppl_pct > budget for q in worse)
    assert not lm.model.has_modes


def test_a_larger_k_is_taken_only_where_it_holds_itself(lm, profile, monkeypatch):
    """Costs need not fall as k rises: between the least k that holds and 1 there may be one that does not."""

    def quality(*_: object, **__: object) -> Quality:
        k = lm.plan.modes[0].k
        return Quality(1.0, 1.0, 2.0 if k < 0.5 or 0.7 < k < 0.8 else 0.1, (0.0, 0.0), 0.0, 1.0, 1)

    asked: list[float] = []
    monkeypatch.setattr(autotune, "perplexity", quality)
    monkeypatch.setattr(autotune, "fastest", lambda lm, mode, profile, ks: asked.extend(ks) or ks[0])
    tuned = tune_k(lm, KWTA(), profile, TOKENS, 1.0)
    assert len(asked) == 2 and 0.5 <= asked[0] < 0.53 and asked[1] == 1.0
    assert tuned.mode.k == asked[0] and any(0.7 < k < 0.8 for k, _ in tuned.tried)


def test_of_what_is_good_enough_the_fastest_is_taken(lm, profile, monkeypatch):
    speeds = {0.3: 1.2, 0.65: 1.19, 1.0: 1.0}

    class Known:
        def ratio(self, a: str, b: str) -> tuple[float, tuple[float, float]]:
            return speeds[lm.plan.modes[0].k], (0, 0)

    monkeypatch.setattr(autotune, "measure", lambda *_: Known())
    assert autotune.fastest(lm, KWTA(), profile, [0.3, 0.65, 1.0]) == 0.65  # about as fast, and better
    speeds[0.65] = 1.1
    assert autotune.fastest(lm, KWTA(), profile, [0.3, 0.65, 1.0]) == 0.3
    speeds[0.3] = speeds[0.65] = 0.9
    assert autotune.fastest(lm, KWTA(), profile, [0.3, 0.65, 1.0]) == 1.0
    lm.use(compose([]))


def test_shipped_texts(lm):
    for name in ("calibration", "tuning", "held_out", "other"):
        assert len(texts.read(name)) >= 60000
    assert texts.read("tuning")[:200] not in texts.read("held_out")
    found = texts.held_out(lm, 50)
    assert len(found) == 51 and found == lm.encode(texts.read("held_out"))[:51]
