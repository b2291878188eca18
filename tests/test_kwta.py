"""KWTA on whole models: dense at its off point, what decoding gives is what evaluation measures, honest counters."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from test_texts import assert_as_alone, begun
from tiny import write_hf

import ralo
from ralo import KWTA, RaloError, StatePack, _core, texts
from ralo.calibrate import calibrate
from ralo.compose import compose
from ralo.lm import LM
from ralo.matrix import Matrix, padded
from ralo.memory import Arena
from ralo.modes.base import Occupant, Override
from ralo.modes.share import FINE, KEEP_ALL, TILES_WORTH, WORTH
from ralo.profile import Profile
from ralo.quality import losses, nll, perplexity
from ralo.sequence import Sequence
from ralo.timing import TIMED
from ralo.weights import PLACES

TOKENS = np.random.default_rng(4).integers(2, 97, 61).tolist()
SETTINGS = {
    "plain": KWTA(k=0.4),
    "count": KWTA(k_abs=20),
    "top-p": KWTA(p=0.8),
    "top-p by magnitude": KWTA(p=0.8, temp=1.0),
    "duty": KWTA(k=0.4, duty=4),
    "blocks": KWTA(k=0.4, block="16"),
    "renorm": KWTA(k=0.4, renorm="on"),
    "gate first": KWTA(k=0.4, gate="on"),
    "keys": KWTA(k=0.9, keys=0.3, keys_min=8),
    "mlp": KWTA(k=0.4, target="mlp"),
    "attn": KWTA(k=0.4, target="attn"),
    "seed": KWTA(k=0.4, form="seed", duty=2),
    "seed keys": KWTA(k=0.9, form="seed", keys=0.3, keys_min=8),
}


@pytest.fixture(scope="module", params=["silu", "relu"])
def directory(request, tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("kwta") / request.param, "llama", hidden_act=request.param, hidden_size=128)


def opened(directory, *modes, quant: str = "f32") -> LM:
    return ralo.load(directory, quant, modes=list(modes))


def decoded(lm: LM, seq: Sequence | None = None, tokens=TOKENS[:-1], dense: bool = False) -> np.ndarray:
    seq = lm.new_sequence() if seq is None else seq
    return np.stack([lm.model.step(t, seq, dense) for t in tokens])


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_off_point_is_dense_bit_for_bit(directory, quant):
    lm = opened(directory, KWTA.off(), quant=quant)
    assert np.array_equal(decoded(lm), decoded(lm, dense=True))
    lm = opened(directory, KWTA(on="off", k=0.1), quant=quant)
    assert not lm.model.has_modes


@pytest.mark.parametrize("name", SETTINGS)
def test_on_differs_from_dense_and_dense_does_not_change(directory, name):
    dense = decoded(opened(directory))
    lm = opened(directory, SETTINGS[name])
    assert not np.array_equal(decoded(lm), dense)
    assert np.array_equal(decoded(lm, dense=True), dense)


@pytest.mark.parametrize("name", SETTINGS)
def test_evaluation_is_what_decoding_gives(directory, name):
    """Several tokens at once, with the mode's state, equal the same tokens one by one."""
    lm = opened(directory, SETTINGS[name])
    together = losses(lm.model, TOKENS, 60)
    np.testing.assert_allclose(together, nll(decoded(lm), np.asarray(TOKENS[1:])), atol=2e-3)


@pytest.mark.parametrize("mode", [KWTA(k=0.7), KWTA(k=0.7, gate="off")], ids=["gate first", "channels"])
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_evaluation_is_what_decoding_gives_of_a_trained_model(mode, quant):
    """One token and many round differently, so that now and then another channel wins: the mean hardly moves."""
    lm = ralo.load("mini", quant, modes=[mode])
    tokens = texts.held_out(lm, 768)
    together, one_by_one = losses(lm.model, tokens, 768), nll(decoded(lm, tokens=tokens[:-1]), np.asarray(tokens[1:]))
    assert np.abs(together - one_by_one).mean() < 0.05
    assert together.mean() == pytest.approx(one_by_one.mean(), abs=0.01)


@pytest.mark.parametrize("name", SETTINGS)
def test_clones_go_on_alike_and_trimming_forgets(directory, name):
    lm = opened(directory, SETTINGS[name])
    seq = lm.new_sequence()
    decoded(lm, seq, TOKENS[:21])
    copy = seq.clone()
    assert copy.nbytes > 0
    assert np.array_equal(decoded(lm, seq, TOKENS[21:30]), decoded(lm, copy, TOKENS[21:30]))
    fresh = lm.new_sequence()
    decoded(lm, fresh, TOKENS[:20])  # 20: where winners of every duty here are chosen anew
    seq.trim(20)
    assert np.array_equal(decoded(lm, seq, TOKENS[30:40]), decoded(lm, fresh, TOKENS[30:40]))


@pytest.mark.parametrize("name", SETTINGS)
def test_two_texts_do_not_disturb_each_other(directory, name):
    lm = opened(directory, SETTINGS[name])
    a, b = lm.new_sequence(), lm.new_sequence()
    turns = np.stack([(lm.model.step(t, a), lm.model.step(u, b))[0] for t, u in zip(TOKENS, TOKENS[::-1], strict=True)])
    assert np.array_equal(turns, decoded(lm, tokens=TOKENS))


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["plain", "top-p", "duty", "gate first", "keys", "seed"])
def test_what_is_skipped_is_what_dense_reads_more(directory, name, quant):
    lm = opened(directory, SETTINGS[name], quant=quant)
    start = lm.model.bytes_read
    decoded(lm)
    middle = lm.model.bytes_read
    decoded(lm, dense=True)
    skipped = (lm.model.bytes_read - middle) - (middle - start)
    assert lm.metrics()["kwta.bytes_skipped"] == skipped > 0


def test_counters(directory):
    lm = opened(directory, KWTA(k_abs=32, target="attn"))
    decoded(lm)
    m, layers = lm.metrics(), lm.layer_metrics()
    assert m["kwta.keep_ratio"] == 32 / 96  # 128 channels of qkv, 64 of o
    assert len(layers) == 2 and sum(x["kwta.bytes_skipped"] for x in layers) == m["kwta.bytes_skipped"]
    assert m["kwta.duty_hits"] == 0 and 0 < m["kwta.flicker"] < 1
    lm.use(compose([KWTA(k_abs=32, target="attn", duty=3)]))
    decoded(lm)
    assert lm.metrics()["kwta.duty_hits"] == 4 * 40  # two of three tokens, four places


def test_flicker_of_winners_that_never_change(directory):
    lm = opened(directory, KWTA(k=0.5))
    decoded(lm, tokens=[5] * 40)
    assert lm.metrics()["kwta.flicker"] < 0.4
    decoded(lm)
    assert lm.metrics()["kwta.flicker"] > 0


def test_prompts_are_dense_unless_asked_for(directory):
    lm = opened(directory, KWTA(k=0.3))
    dense = lm.model.prefill(TOKENS, lm.new_sequence(), dense=True)
    assert np.array_equal(lm.model.prefill(TOKENS, lm.new_sequence()), dense)
    lm = opened(directory, KWTA(k=0.3, prefill="on"))
    assert not np.array_equal(lm.model.prefill(TOKENS, lm.new_sequence()), dense)


def test_overrides_hold_where_they_say(directory):
    where = (
        Override(None, None, {"on": "off"}),
        Override(frozenset({1}), frozenset({"down"}), {"on": "on", "k": 0.25}),
    )
    lm = opened(directory, KWTA(k=0.5, gate="off", where=where))
    assert [sorted(s.taken) for s in lm.model.slots] == [[], ["down"]]
    decoded(lm)
    assert lm.metrics()["kwta.keep_ratio"] <= 0.25  # relu has zeros besides
    with pytest.raises(RaloError, match=r"\[\[kwta.where\]\] names layer 7, the model has 2"):
        opened(directory, KWTA(where=(Override(frozenset({7}), None, {"k": 1.0}),)))


def test_k_decides_how_much_is_kept(directory):
    lm = opened(directory, KWTA(k=0.4, gate="off"))
    decoded(lm)
    counts = {p: o.slot.counts() for p, o in lm.model.slots[0].taken.items()}
    share = {p: c["kept"] / c["channels"] for p, c in counts.items()}
    assert share["qkv"] == pytest.approx(0.82, abs=0.02) and share["o"] == pytest.approx(0.5, abs=0.02)
    assert share["down"] <= 0.51


def test_a_profile_chooses_about_as_many(directory):
    lm = opened(directory)
    lm.use(compose([KWTA(k=0.5, gate="off")]), calibrate(lm, TOKENS, 40))
    decoded(lm)
    assert 0.3 < lm.metrics()["kwta.keep_ratio"] < 0.95
    assert perplexity(lm.model, TOKENS, 60).kl > 0


def test_relu_reads_no_neuron_that_its_gate_blocks(tmp_path):
    lm = opened(write_hf(tmp_path / "relu", "llama", hidden_act="relu"), KWTA(k=1.0))
    dense, kept = decoded(lm, dense=True), decoded(lm)
    np.testing.assert_allclose(kept, dense, rtol=1e-4, atol=1e-4)
    assert lm.metrics()["kwta.keep_ratio"] == pytest.approx(0.5, abs=0.1)  # random weights block about half


def test_gate_first_needs_a_gate(tmp_path):
    opt = write_hf(tmp_path / "opt", "opt")
    with pytest.raises(RaloError, match="--kwta-gate=on needs an MLP with a gate"):
        opened(opt, KWTA(gate="on"))
    assert opened(opt, KWTA(k=0.5)).model.has_modes


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "opt", "gpt2"])
def test_every_architecture(tmp_path, kind):
    lm = opened(write_hf(tmp_path / kind, kind), KWTA(k=0.5, keys=0.5, keys_min=8))
    assert np.isfinite(decoded(lm)).all() and lm.metrics()["kwta.bytes_skipped"] > 0
    assert lm.metrics()["guard.nonfinite"] == 0


def test_the_seed_form_is_dense_between_its_steps(directory):
    lm = opened(directory, KWTA(k=0.2, form="seed", duty=3, gate="off"))
    first = lm.new_sequence()
    assert not np.array_equal(decoded(lm, first, TOKENS[:1]), decoded(lm, tokens=TOKENS[:1], dense=True))
    second = first.clone()
    assert np.array_equal(decoded(lm, first, TOKENS[1:2]), decoded(lm, second, TOKENS[1:2], dense=True))


# ---------------------------------------------------------------- int8 weights by halves


TILES, LIST = "the others by halves", "of them whole, the others by halves"  # how all of them end, and lists


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


def everywhere(k: float, **settings) -> KWTA:
    """The same share at every place."""
    return KWTA(gate="off", where=(Override(None, None, {"k": k}),), **settings)


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


# ---------------------------------------------------------------- sides


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Channels enough for two sides at every place."""
    return write_hf(
        tmp_path_factory.mktemp("kwta") / "wide", "llama", hidden_size=512, intermediate_size=1040, head_dim=64
    )


@pytest.fixture
def run_on():
    """run_on(n): from now on by n threads."""
    before = _core.threads()
    yield _core.set_threads
    _core.set_threads(before)


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("fine", [0.05, 1.0], ids=["halves", "whole"])
@pytest.mark.parametrize("k", [0.5, KEEP_ALL], ids=["fewer", "nearly all"])
def test_sides_give_the_same_bits_on_any_number_of_threads(wide, run_on, quant, fine, k):
    lm = opened(wide, everywhere(k, fine=fine), quant=quant)
    found = []
    for n in (1, 2, 3):
        run_on(n)
        found.append(decoded(lm, tokens=TOKENS[:20]))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_sides_are_counted_as_one(wide, run_on, quant):
    """Bytes not read, winners and their change, whoever chose them."""
    counts = []
    for n in (1, 2):
        run_on(n)
        lm = opened(wide, KWTA(k=0.5), quant=quant)
        decoded(lm, tokens=TOKENS[:40])
        slots = [layer.taken[place].slot for layer in lm.model.slots for place in ("qkv", "o", "down")]
        counts.append([slot.counts() for slot in slots])
    assert counts[0] == counts[1]
    assert all(c["steps"] == 40 and c["bytes_skipped"] > 0 for c in counts[0])
    lists = [isinstance(slot, _core.KwtaInput) for slot in slots]  # who keeps all has no winners that change
    assert lists == [quant != "int8", True, True] * 2
    assert [c["compared"] > 0 for c in counts[0]] == lists


def test_each_side_has_winners_in_proportion():
    """The largest |x| * norm of the first 272 channels of 512, and of the others."""
    n, k, middle = 512, 128, 272
    slot = _core.KwtaInput(n, None, 1, "top", k, 1.0, 1, False, False, 0.0, None, 0, 0.0)
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    shares = (k * middle // n, k - k * middle // n)
    sides = np.split(np.abs(x), [middle])
    want = np.concatenate([np.sort(np.argsort(-s)[:share]) for s, share in zip(sides, shares, strict=True)])
    want[shares[0] :] += middle
    assert slot.winners(x) == want.tolist()
