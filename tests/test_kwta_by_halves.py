"""KWTA by halves of int8 weights, on whole models: lists of channels, all of them in tiles, gates of ReLU models."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from test_kwta import TOKENS, decoded, everywhere, opened
from test_texts import assert_as_alone, begun
from tiny import write_hf

import ralo
from ralo import KWTA, StatePack, _core, texts
from ralo.calibrate import calibrate
from ralo.compose import compose
from ralo.lm import LM
from ralo.matrix import Matrix, padded
from ralo.memory import Arena
from ralo.modes.base import Occupant, Override
from ralo.modes.share import FINE, KEEP_ALL, TILES_WORTH, WORTH
from ralo.profile import Profile
from ralo.quality import losses, nll, perplexity
from ralo.timing import TIMED
from ralo.weights import PLACES

TILES, LIST = "the others by halves", "of them whole, the others by halves"  # how all of them end, and lists


@pytest.fixture(scope="module", params=["silu", "relu"])
def directory(request, tmp_path_factory):
    return write_hf(
        tmp_path_factory.mktemp("halves") / request.param, "llama", hidden_act=request.param, hidden_size=128
    )


def inputs(lm: LM) -> list[tuple[Occupant, Matrix]]:
    """What chooses channels, and of which weights."""
    return [
        (occupant, getattr(layer, place))
        for layer, slots in zip(lm.model.weights.layers, lm.model.slots, strict=True)
        for place, occupant in slots.taken.items()
        if isinstance(occupant.slot, _core.KwtaInput | _core.KwtaTiles)
    ]


def read(lm: LM) -> int:
    """Bytes while decoding."""
    before = lm.model.bytes_read
    decoded(lm)
    return lm.model.bytes_read - before


def most(fine: float, n: int) -> int:
    """Channels of n that are read whole."""
    return round(fine * n)


@pytest.mark.parametrize(("k", "tiled"), [(0.9, "qkv o up down"), (0.6, "qkv up"), (0.1, "")])
def test_halves_read_less(directory, k, tiled):
    """Most of a place is all of it, in tiles; less of it is a list."""
    halved, whole = (opened(directory, KWTA(k=k, gate="off", **fine), quant="int8") for fine in ({}, {"fine": 1.0}))
    less, more = read(halved), read(whole)
    assert less < 0.8 * more
    assert halved.metrics()["kwta.bytes_skipped"] - whole.metrics()["kwta.bytes_skipped"] == more - less
    for layer, slots in zip(halved.model.weights.layers, halved.model.slots, strict=True):
        assert set(slots.taken) == set(PLACES)
        for place, occupant in slots.taken.items():
            matrix, in_tiles = getattr(layer, place), place in tiled.split()
            assert isinstance(occupant.slot, _core.KwtaTiles if in_tiles else _core.KwtaInput)
            assert occupant.runs.endswith(TILES) and occupant.runs.startswith("keep all, " if in_tiles else "keep 0.")
            tiles = matrix.oc // 64 * padded(matrix.ic) * (32 + 2)  # half of 64 weights, and their scale
            assert occupant.nbytes == (tiles if in_tiles else matrix.data.nbytes)
    assert halved.model.nbytes == halved.model.weights.nbytes + sum(o.nbytes for o, _ in inputs(halved))


def test_tiles_read_half_of_everything_and_the_best_whole(directory):
    lm = opened(directory, everywhere(KEEP_ALL), quant="int8")
    decoded(lm)
    assert len(inputs(lm)) == 8
    for occupant, matrix in inputs(lm):
        counts, n, fine = occupant.slot.counts(), matrix.ic, most(FINE, matrix.ic)
        assert (counts["steps"], counts["channels"], counts["kept"]) == (60, 60 * n, 60 * n)
        assert counts["fine"] == 60 * fine and occupant.runs == f"keep all, {fine} whole, the others by halves"
        assert counts["bytes_read"] == 60 * (matrix.tiles(Arena()).nbytes + fine * matrix.nbytes // n)
        assert counts["bytes_skipped"] == 60 * matrix.nbytes - counts["bytes_read"]
        assert occupant.share == 1.0
    metrics = lm.metrics()
    assert metrics["kwta.keep_ratio"] == 1 and metrics["kwta.flicker"] == metrics["kwta.duty_hits"] == 0
    assert metrics["kwta.bytes_skipped"] == sum(layer["kwta.bytes_skipped"] for layer in lm.layer_metrics())


@pytest.mark.parametrize("k", [0.9, KEEP_ALL])
def test_halves_of_a_trained_model_change_little(k):
    """Much less than leaving out as many bytes does."""
    tokens = texts.held_out(ralo.load("mini", "int8"), 128)
    kl = {}
    for name, mode in {"halves": everywhere(k), "less": KWTA(k=0.4, gate="off", fine=1.0)}.items():
        lm = ralo.load("mini", "int8", modes=[mode])
        kl[name] = perplexity(lm.model, tokens, 128).kl, read(lm)
    assert 0 < kl["halves"][0] < kl["less"][0] and kl["halves"][1] < kl["less"][1]


@pytest.mark.parametrize("fine", [0.1, 0.3])
@pytest.mark.parametrize("k", [0.9, KEEP_ALL])
def test_fine_ratio(directory, fine, k):
    lm = opened(directory, everywhere(k, fine=fine, target="attn"), quant="int8")
    decoded(lm)
    whole = [most(fine, n) for n in (128, 64)]  # channels of qkv and of o
    assert lm.metrics()["kwta.fine_ratio"] == sum(whole) / 192
    said = [f"{n} whole, {TILES}" if k >= KEEP_ALL else f"{n} {LIST}" for n in whole * 2]
    assert [o.runs.endswith(f", {end}") for end, (o, _) in zip(said, inputs(lm), strict=True)] == [True] * 4


def test_all_fine_reads_winners_whole(directory):
    """As if there were no halves: every winner's row, and nothing else."""
    lm = opened(directory, KWTA(k=0.9, gate="off", fine=1.0), quant="int8")
    decoded(lm)
    assert inputs(lm)
    for occupant, matrix in inputs(lm):
        counts = occupant.slot.counts()
        row = (matrix.data.nbytes + matrix.scales.nbytes) / matrix.ic
        assert counts["bytes_read"] == counts["kept"] * row and counts["fine"] == 0
        assert "halves" not in occupant.runs and occupant.nbytes == 0
    assert lm.metrics()["kwta.fine_ratio"] == 0


@pytest.mark.parametrize(
    "settings",
    [{"k_abs": 40}, {"p": 0.9}, {"duty": 2}, {"block": "16"}, {"renorm": "on"}, {"form": "seed"}],
    ids=str,
)
@pytest.mark.parametrize("k", [0.5, 0.8], ids=["lists", "nearly all"])
def test_other_choices_have_no_halves(directory, settings, k):
    mode = KWTA(**({"k": k, "gate": "off"} | settings))
    lm, whole = (opened(directory, m, quant="int8") for m in (mode, replace(mode, fine=1.0)))
    assert inputs(lm) and not any("halves" in o.runs for o, _ in inputs(lm))
    assert np.array_equal(decoded(lm), decoded(whole)) and lm.metrics()["kwta.fine_ratio"] == 0


@pytest.mark.parametrize("quant", ["f32", "bf16", "int4"])
def test_only_int8_has_halves(directory, quant):
    lm, whole = (opened(directory, KWTA(k=0.9, **fine), quant=quant) for fine in ({}, {"fine": 1.0}))
    assert inputs(lm) and not any("halves" in o.runs for o, _ in inputs(lm))
    assert np.array_equal(decoded(lm), decoded(whole)) and lm.metrics()["kwta.fine_ratio"] == 0


def test_keeping_all_is_dense_however_few_are_fine(directory):
    lm = opened(directory, KWTA(k=1.0, fine=0.05, gate="off"), quant="int8")
    assert np.array_equal(decoded(lm), decoded(lm, dense=True)) and not inputs(lm)


def timed(known: Profile, halved: float, tiled: float) -> Profile:
    """Of dense's time: all channels as a list by halves, and in tiles."""
    seconds = {place: np.array([TIMED, TIMED], np.float32) for place in PLACES}
    lists = {place: found * [[1], [halved]] for place, found in seconds.items()}
    return replace(known, seconds=seconds, halved=lists, tiled=dict.fromkeys(PLACES, tiled))


def test_what_is_no_faster_by_halves_is_read_whole(directory):
    lm = opened(directory, quant="int8")
    known = calibrate(lm, TOKENS, 40)
    for halved, tiled in product((WORTH - 0.01, WORTH + 0.01), (TILES_WORTH - 0.01, TILES_WORTH + 0.01)):
        said = timed(known, halved, tiled)
        as_list = LIST if halved < WORTH else ""
        for k, end in ((0.9, as_list), (KEEP_ALL, TILES if tiled < TILES_WORTH else as_list)):
            lm.use(compose([everywhere(k)]), said)
            assert len(inputs(lm)) == 8
            assert all(o.runs.endswith(end) and ("halves" in o.runs) == bool(end) for o, _ in inputs(lm))
    for tiled, taken in ((0.5, True), (TILES_WORTH + 0.01, False)):  # where the dial chooses
        lm.use(compose([KWTA(k=0.7, gate="off")]), timed(known, WORTH - 0.01, tiled))
        assert any(isinstance(o.slot, _core.KwtaTiles) for o, _ in inputs(lm)) == taken and inputs(lm)


@pytest.mark.parametrize("k", [0.9, KEEP_ALL])
@pytest.mark.parametrize("calibrated", [False, True])
def test_halves_and_whole_texts(directory, calibrated, k):
    """Dense does not change beside them, clones go on alike, and several tokens give what they give one by one."""
    lm = opened(directory, quant="int8")
    dense = decoded(lm)
    known = timed(calibrate(lm, TOKENS, 40), 0.5, 0.5) if calibrated else None
    lm.use(compose([everywhere(k)]), known)
    halved = decoded(lm)
    assert not np.array_equal(halved, dense) and np.array_equal(decoded(lm, dense=True), dense)
    channels = [matrix.ic for _, matrix in inputs(lm)]
    assert lm.metrics()["kwta.fine_ratio"] == sum(most(FINE, n) for n in channels) / sum(channels)
    seq = lm.new_sequence()
    decoded(lm, seq, TOKENS[:21])
    assert np.array_equal(decoded(lm, seq.clone(), TOKENS[21:-1]), halved[21:])
    seq.trim(10)
    assert np.array_equal(decoded(lm, seq, TOKENS[10:-1]), halved[10:])
    together = losses(lm.model, TOKENS, 60)
    assert together.mean() == pytest.approx(nll(halved, np.asarray(TOKENS[1:])).mean(), abs=0.02)


@pytest.mark.parametrize("place", PLACES)
def test_a_nan_planted_in_tiles_is_dense_and_counted(directory, place):
    lm, without = (opened(directory, everywhere(KEEP_ALL), quant="int8") for _ in range(2))
    setattr(without.model.slots[1], place, None)
    without.model.use(without.model.slots)
    lm.model.slots[1].taken[place].slot.plant = True
    assert np.array_equal(decoded(lm, tokens=TOKENS[:1]), decoded(without, tokens=TOKENS[:1]))
    assert lm.metrics()["guard.nonfinite"] == 1
    assert np.isfinite(decoded(lm)).all() and lm.metrics()["guard.nonfinite"] == 1


def test_texts_together_are_as_alone_in_tiles(directory):
    """Gates by halves too, where relu shuts neurons."""
    for mode in (everywhere(KEEP_ALL), KWTA(k=0.9)):
        lm = opened(directory, mode, quant="int8")
        assert_as_alone(lm.model, begun(lm.model, [1, 30, 2, 64, 17]), dense=[False] * 4 + [True])


@pytest.mark.parametrize("k", [KEEP_ALL, 0.9])
def test_of_a_gate_in_front_of_neurons_a_list_is_read(directory, k):
    """Where it is not by halves that the neurons' slot reads it: of tiles there are no channels to ask for."""
    lm = opened(directory, quant="int8")
    relu, dial = lm.model.cfg.act == "relu", KWTA(k=0.9, where=(Override(None, frozenset({"up"}), {"k": k}),))
    lm.use(compose([StatePack(target="mlp", min_ctx=0), dial] if relu else [replace(dial, gate="on")]))
    for slots in lm.model.slots:
        assert slots.taken["mlp"].mode == ("state-pack" if relu else "kwta")
        assert slots.taken["up"].runs.endswith(LIST)
    assert np.isfinite(decoded(lm)).all() and lm.metrics()["guard.nonfinite"] == 0


# ---------------------------------------------------------------- gates by halves, where relu shuts neurons


@pytest.fixture(scope="module")
def mini():
    return ralo.load("mini", "int8")


BY_HALVES = KWTA(k=1.0, where=(Override(None, frozenset({"up"}), {"k": KEEP_ALL}),))  # the gate, and nothing else


def gates(lm: LM) -> set[str]:
    return {slots.taken["mlp"].runs for slots in lm.model.slots}


def test_at_one_the_gate_is_exact(mini):
    """What relu shuts is not read, and nothing else is left out: the text is dense's."""
    prompt = texts.held_out(mini, 24)
    written, logits = {}, {}
    for name, modes in {"dense": [], "gate": [KWTA(k=1.0)], "all fine": [KWTA(k=1.0, fine=1.0)]}.items():
        mini.use(compose(modes))
        seq = mini.new_sequence()
        logits[name] = decoded(mini, seq, prompt)
        tokens = [int(logits[name][-1].argmax())]
        for _ in range(40):
            tokens.append(int(mini.model.step(tokens[-1], seq).argmax()))
        written[name] = tokens
        assert not modes or gates(mini) == {"gate first, neurons it does not block"}
    assert written["gate"] == written["dense"]
    assert np.array_equal(logits["gate"], logits["all fine"])
    np.testing.assert_allclose(logits["gate"], logits["dense"], atol=0.01)
    mini.use(compose([KWTA(k=1.0)]))
    assert perplexity(mini.model, texts.held_out(mini, 128), 128).kl < 1e-5


@pytest.mark.parametrize("k", [0.5, 0.99, None], ids=["k 0.5", "k 0.99", "the gate alone"])
def test_below_one_gates_are_read_by_halves(mini, k):
    mini.use(compose([KWTA(k=1.0)]))
    exact, more = decoded(mini), read(mini)
    mini.use(compose([KWTA(k=k, target="mlp") if k else BY_HALVES]))
    assert gates(mini) == {"gate first by halves, neurons it does not block"}
    assert [set(slots.taken) for slots in mini.model.slots] == [{"mlp"}] * len(mini.model.slots)
    found, less = decoded(mini), read(mini)
    assert not np.array_equal(found, exact) and less < 0.9 * more
    assert 0 < perplexity(mini.model, texts.held_out(mini, 256), 256).kl < 0.01
    (up,) = {layer.up.nbytes for layer in mini.model.weights.layers}
    tiles = mini.model.weights.layers[0].up.tiles(Arena(), "gate")
    assert tiles.nbytes == up // 2 * 34 // 66
    assert {s.taken["mlp"].nbytes for s in mini.model.slots} == {up // 2 + tiles.nbytes}, "up's rows, the gate's tiles"


def test_gates_by_halves_are_skipped_bytes(mini):
    mini.use(compose([BY_HALVES]))
    halved, before = read(mini), mini.metrics()["kwta.bytes_skipped"]
    start = mini.model.bytes_read
    decoded(mini, dense=True)
    assert before == mini.model.bytes_read - start - halved > 0


@pytest.mark.parametrize(
    ("settings", "quant"),
    [({"fine": 1.0}, "int8"), ({"duty": 2}, "int8"), ({"renorm": "on"}, "int8"), ({}, "int4"), ({}, "bf16")],
    ids=str,
)
def test_gates_that_are_never_by_halves(settings, quant):
    lm = ralo.load("mini", quant, modes=[KWTA(k=0.5, target="mlp", **settings)])
    assert gates(lm) == {"gate first, neurons it does not block"}


def test_gates_whose_tiles_take_as_long_are_exact(directory):
    lm = opened(directory, quant="int8")
    known = calibrate(lm, TOKENS, 40)
    relu = lm.model.cfg.act == "relu"
    for tiled, halves in ((TILES_WORTH - 0.01, relu), (TILES_WORTH + 0.01, False)):
        lm.use(compose([BY_HALVES]), timed(known, 0.5, tiled))
        assert any("gate first by halves" in o.runs for s in lm.model.slots for o in s.taken.values()) == halves
