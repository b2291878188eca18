"""Gates guessed by factors on whole models: the rank is chosen by the winners it finds, refused where it does not pay,
and what runs keeps what every mode promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commandline import refused
from tiny import write_hf
from tiny_models import make_config, make_weights

import ralo
from ralo import KWTA, Event, RaloError, StatePack
from ralo import profile as profiles
from ralo.calibrate import calibrate, gate_guess
from ralo.cli import main
from ralo.commands.explain import runs
from ralo.compose import compose
from ralo.formats import safetensors
from ralo.lm import LM
from ralo.modes import guess
from ralo.modes.base import Override
from ralo.profile import Profile
from ralo.quality import losses, nll
from ralo.tt.lowrank import Weighed

D, F, RANK = 512, 1536, 16
TOKENS = np.random.default_rng(4).integers(2, 97, 121).tolist()
LOOK = np.random.default_rng(5).integers(2, 97, 601).tolist()
QUANTS = ("f32", "int8", "int4")


def made(directory: Path, act: str, rank: int, shut: float = 1.6, **others) -> Path:
    """A model whose gates are of a rank, and of a relu less or more often shut."""
    settings = {"hidden_act": act, "hidden_size": D, "intermediate_size": F, "mlp_bias": True} | others
    write_hf(directory, "llama", **settings)
    rng, weights = np.random.default_rng(3), make_weights(make_config("llama", **settings))
    for name, values in weights.items():
        if name.endswith("gate_proj.weight") and rank < D:
            product = rng.standard_normal((F, rank)) @ rng.standard_normal((rank, D))
            weights[name] = (product / (rank * D) ** 0.5).astype(np.float32)
        if name.endswith("gate_proj.bias"):
            values[:] = -shut if act == "relu" else 0.0
    safetensors.write_file(directory / "model.safetensors", weights, {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def low(tmp_path_factory):
    return made(tmp_path_factory.mktemp("predict") / "low", "relu", RANK)


@pytest.fixture(scope="module")
def profile(low):
    return calibrate(ralo.load(low, "f32"), LOOK, 20)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    directory = made(tmp_path_factory.mktemp("predict") / "full", "relu", D, shut=0.3, vocab_size=2003)
    look = np.random.default_rng(5).integers(2, 2003, 1201).tolist()  # inputs in all directions
    calibrate(ralo.load(directory, "f32"), look, 20).save(directory / profiles.NAME)
    return directory


@pytest.fixture(scope="module")
def smooth(tmp_path_factory):
    directory = made(tmp_path_factory.mktemp("predict") / "smooth", "silu", RANK)
    calibrate(ralo.load(directory, "f32"), LOOK, 20).save(directory / profiles.NAME)
    return directory


def opened(directory: Path, profile: Profile | None, *modes, quant: str = "f32") -> LM:
    lm = ralo.load(directory, quant)
    lm.use(compose(modes), profile)
    return lm


def decoded(lm: LM, seq=None, tokens=TOKENS[:-1], dense: bool = False) -> np.ndarray:
    seq = lm.new_sequence() if seq is None else seq
    return np.stack([lm.model.step(t, seq, dense) for t in tokens])


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize("quant", QUANTS)
def test_the_rank_that_is_there_is_found(low, profile, quant):
    lm = opened(low, profile, KWTA(k=1.0, predict="on"), quant=quant)
    assert "rank 16 finds" in runs(lm, "0", "up") and "up" not in lm.model.slots[0].taken
    plain = opened(low, profile, KWTA(k=1.0), quant=quant)
    got, want = decoded(lm), decoded(plain)
    np.testing.assert_allclose(got, want, atol={"f32": 1e-3, "int8": 0.03, "int4": 0.1}[quant] * np.abs(want).max())
    counts = lm.model.slots[0].taken["mlp"].slot.counts()
    most = 0.12 if quant == "f32" else 0.25  # about .06 are open
    assert 0.03 < counts["candidates"] / counts["guessed"] < most
    assert lm.metrics()["kwta.recall"] > (0.999 if quant == "f32" else 0.97)
    assert (
        plain.metrics()["kwta.recall"] == 1
        and lm.metrics()["kwta.bytes_skipped"] > (plain.metrics()["kwta.bytes_skipped"])
    )


def test_a_gate_of_full_rank_is_refused_with_the_reason(full):
    lm, plain = (ralo.load(full, "f32", modes=[KWTA(k=1.0, predict=p)]) for p in ("on", "off"))
    why = runs(lm, "1", "up")
    assert why.startswith("kwta: gate first, neurons it does not block; kwta guesses no gates: rank ")
    assert "which takes as long as" in why and why.endswith("of it, more than 0.90")
    assert np.array_equal(decoded(lm), decoded(plain)) and lm.metrics()["kwta.recall"] == 1
    assert lm.model.slots[0].taken["mlp"].slot.counts()["guessed"] == 0


def test_what_is_read_without_a_guess_is_what_it_must_beat(low, profile):
    """Channels that are skipped anyway count: the same guess pays beside 0.6 of the gate and not beside 0.1."""
    where = tuple(Override(frozenset({i}), frozenset({"up"}), {"k": k}) for i, k in enumerate((0.6, 0.1)))
    lm = opened(low, profile, KWTA(k=1.0, predict="on", where=where))
    assert "up" not in lm.model.slots[0].taken and not lm.model.slots[0].left  # by rows, not by channels
    assert "up" in lm.model.slots[1].taken and lm.model.slots[1].left["mlp"].endswith("more than 0.09")


def test_other_activations_keep_a_share_of_gates(smooth):
    where = (Override(None, frozenset({"down"}), {"k": 0.1}),)
    lm = ralo.load(smooth, "f32", modes=[KWTA(k=1.0, target="mlp", gate="on", predict="on", where=where)])
    assert "0.10 of neurons win, rank 16 finds" in runs(lm, "0", "up")
    decoded(lm)
    counts = lm.model.slots[0].taken["mlp"].slot.counts()
    keep = counts["candidates"] / 120
    assert keep == int(keep) and counts["kept"] / 120 <= keep < F / 2
    assert lm.metrics()["kwta.recall"] > 0.98


def test_candidates_are_the_fewest_that_hold_the_winners():
    rng = np.random.default_rng(0)
    gate = rng.standard_normal((64, 256)).astype(np.float32)
    guessed = gate + 0.3 * rng.standard_normal(gate.shape).astype(np.float32)
    won = gate > 1
    slack, _, likely = guess.by_slack(guessed - 1, won)
    assert likely[won].mean() >= guess.RECALL > (guessed - 1 + slack - 0.02 > 0)[won].mean()
    top = np.zeros_like(won)
    np.put_along_axis(top, np.argsort(-np.abs(gate), axis=1)[:, :20], True, axis=1)
    _, keep, likely = guess.by_count(guessed, top, 20)
    assert likely[top].mean() >= guess.RECALL and (likely.sum(axis=1) == keep).all()
    fewer = np.argsort(np.argsort(-np.abs(guessed), axis=1), axis=1) < keep - 1
    assert fewer[top].mean() < guess.RECALL
    assert guess.by_slack(guessed, np.zeros_like(won))[0] == 0, "nothing wins, nothing is needed"
    assert guess.by_slack(gate, gate > 0)[0] == 0, "what a guess says is open is read"


def test_smaller_ranks_are_the_beginning_of_larger_ones(full):
    lm = ralo.load(full, "f32")
    up = lm.model.weights.layers[0].up
    x = np.random.default_rng(1).standard_normal((900, D)) * np.linspace(0.2, 2, D)
    known = gate_guess(lm, 0, x.T @ x)
    gate = up(np.eye(D, dtype=np.float32))[:, up.slices["gate"]] - up.bias[up.slices["gate"]]
    for rank in (8, 64):
        first, second = Weighed.of(gate, x.T @ x).factors(rank)
        got = guess.factored(known, rank, "f32").unpack()[:, :F]
        assert np.abs(got - first @ second).max() < 2e-3 * np.abs(first @ second).max()


# ---------------------------------------------------------------- what every mode promises


def on(low, profile, quant: str = "f32", **settings) -> LM:
    return opened(low, profile, KWTA(**{"k": 0.7, "predict": "on"} | settings), quant=quant)


@pytest.mark.parametrize("quant", QUANTS)
def test_evaluation_is_what_decoding_gives(low, profile, quant):
    lm = on(low, profile, quant)
    together = losses(lm.model, TOKENS, 120)
    one_by_one = nll(decoded(lm), np.asarray(TOKENS[1:]))
    assert np.abs(together - one_by_one).mean() < (2e-3 if quant == "f32" else 0.05)


def test_clones_go_on_alike_and_trimming_forgets(low, profile):
    lm = on(low, profile)
    seq, fresh = lm.new_sequence(), lm.new_sequence()
    decoded(lm, seq, TOKENS[:21])
    copy = seq.clone()
    assert np.array_equal(decoded(lm, seq, TOKENS[21:30]), decoded(lm, copy, TOKENS[21:30]))
    decoded(lm, fresh, TOKENS[:20])
    seq.trim(20)
    assert np.array_equal(decoded(lm, seq, TOKENS[30:40]), decoded(lm, fresh, TOKENS[30:40]))


@pytest.mark.parametrize("quant", QUANTS)
def test_what_is_skipped_is_what_dense_reads_more(low, profile, quant):
    """Tokens whose guess is looked at included."""
    lm = on(low, profile, quant)
    start = lm.model.bytes_read
    decoded(lm)
    middle = lm.model.bytes_read
    decoded(lm, dense=True)
    skipped = (lm.model.bytes_read - middle) - (middle - start)
    assert lm.metrics()["kwta.bytes_skipped"] == skipped > 0
    assert lm.model.slots[0].taken["mlp"].slot.counts()["checked"] > 0


def test_a_planted_nan_is_caught(low, profile):
    lm = on(low, profile)
    lm.model.slots[1].taken["mlp"].slot.plant = True
    assert np.isfinite(decoded(lm, tokens=TOKENS[:3])).all() and lm.metrics()["guard.nonfinite"] == 1


def test_dense_does_not_change(low, profile):
    assert np.array_equal(decoded(on(low, profile), dense=True), decoded(opened(low, profile)))


# ---------------------------------------------------------------- beside other modes


def test_event_in_front_of_up_keeps_the_gate_to_itself(low, profile):
    beside = "kwta guesses no gates beside event"
    lm = opened(low, profile, KWTA(k=1.0, predict="on"), Event(hold=1))
    assert "up" not in lm.model.slots[0].taken and not any(note.startswith(beside) for note in lm.plan.notes)
    lm = opened(low, profile, KWTA(k=1.0, predict="on"), Event(hold=1, topk=0.2, deltas="all"))
    assert lm.model.slots[0].taken["up"].mode == "event"
    assert any(note.startswith(beside) for note in lm.plan.notes)
    decoded(lm, tokens=TOKENS[:5])
    assert lm.model.slots[0].taken["mlp"].slot.counts()["guessed"] == 0


def test_statepack_has_the_mlp(low, profile):
    lm = opened(low, profile, StatePack(target="mlp"), KWTA(k=1.0, predict="on"))
    assert runs(lm, "0", "up").endswith("kwta guesses no gates: state-pack has the MLP")


# ---------------------------------------------------------------- profiles and messages


def test_guesses_are_saved_and_read_back(low, profile, tmp_path):
    profile.save(tmp_path / "a.profile")
    again = profiles.load(tmp_path / "a.profile")
    assert again.guesses.keys() == {0, 1} == profile.guesses.keys()
    for layer, (first, second) in profile.guesses.items():
        assert first.dtype == second.dtype == np.float16 and first.shape == (D, 192) and second.shape == (192, F)
        assert np.array_equal(again.guesses[layer][0], first) and np.array_equal(again.guesses[layer][1], second)


def test_half_a_guess_is_not_a_profile(profile, tmp_path):
    profile.save(tmp_path / "a")
    arrays = {name: np.array(t.stored()) for name, t in safetensors.open_file(tmp_path / "a").items()}
    del arrays["layers.1.guess_second"]
    safetensors.write_file(tmp_path / "b", arrays, safetensors.metadata(tmp_path / "a"))
    with pytest.raises(RaloError, match="is not a profile; make one with ralo calibrate"):
        profiles.load(tmp_path / "b")


def test_inputs_are_of_the_whole_text(low, monkeypatch):
    monkeypatch.setattr("ralo.calibrate.INPUT_TOKENS", 8)
    few = calibrate(ralo.load(low, "f32"), LOOK, 10).inputs[1]
    monkeypatch.setattr("ralo.calibrate.INPUT_TOKENS", 1000)
    many = calibrate(ralo.load(low, "f32"), LOOK, 10).inputs[1]
    assert many.shape == (600, D) and np.array_equal(few, many[::75]), "one in 75, an odd number"


def test_only_gated_mlps_have_guesses(tmp_path):
    assert calibrate(ralo.load(write_hf(tmp_path / "opt", "opt"), "f32"), TOKENS, 20).guesses == {}


def test_an_old_profile_says_what_to_do(low, profile, tmp_path, capsys):
    replace(profile, guesses={}).save(tmp_path / "old.profile")
    plan = tmp_path / "plan.toml"
    plan.write_text('profile = "old.profile"\n[kwta]\nk = 1.0\n')
    assert main(["explain", "-m", str(low), "--plan", str(plan)]) == 0
    capsys.readouterr()
    want = "ralo explain: --kwta-predict=on needs a profile with factors of the gates: make one with ralo calibrate"
    assert refused(capsys, "explain", "-m", low, "--plan", plan, "--kwta-predict=on") == want
    assert refused(capsys, "explain", "-m", low, "--kwta-predict=on") == want


def test_the_command_line_shows_what_was_chosen(low, profile, tmp_path, capsys, monkeypatch):
    profile.save(tmp_path / "new.profile")
    plan = tmp_path / "plan.toml"
    plan.write_text('profile = "new.profile"\n[kwta]\nk = 1.0\npredict = "on"\n')
    assert main(["explain", "-m", str(low), "--plan", str(plan)]) == 0
    assert "rank 16 finds" in capsys.readouterr().out
    monkeypatch.setenv("RALO_KWTA_PREDICT", "off")
    assert main(["explain", "-m", str(low), "--plan", str(plan)]) == 0
    assert "rank" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "settings", "flags", "message"),
    [
        ("opt", {}, [], "--kwta-predict=on needs an MLP with a gate, this model's has none"),
        ("llama", {}, [], "--kwta-predict=on guesses a gate that is computed first: use --kwta-gate=on"),
        ("llama", {"hidden_act": "relu"}, ["--kwta-gate=off"], "is computed first: use --kwta-gate=on"),
        ("llama", {}, ["--kwta-target=attn"], "gates of the MLP, which --kwta-target=attn leaves out"),
        ("llama", {}, ["--kwta-gate=on", "--kwta-duty=2"], "at every token: use no duty and no blocks"),
        ("llama", {}, ["--kwta-gate=on", "--kwta-block=16"], "at every token: use no duty and no blocks"),
    ],
)
def test_where_it_cannot_be(tmp_path, capsys, kind, settings, flags, message):
    model = write_hf(tmp_path / "model", kind, **settings)
    assert refused(capsys, "explain", "-m", model, "--kwta-predict=on", *flags).endswith(message)
