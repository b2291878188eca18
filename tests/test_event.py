"""Event-driven decode on whole models: dense at its off point, honest counters, budgets that can be replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import KWTA, Event, RaloError, StatePack, _core
from ralo.commands.explain import runs
from ralo.compose import compose
from ralo.guard import GuardOptions
from ralo.lm import LM
from ralo.modes.base import Override
from ralo.pace import WARM, read_schedule
from ralo.plan import Setup
from ralo.quality import losses, nll
from ralo.sequence import Sequence

TOKENS = np.random.default_rng(4).integers(2, 97, 221).tolist()
SHORT = Event(keys=16, min_ctx=0, hold=8)
LEVELS = "0123456789abcd"  # of a budget, as they are recorded
TURNS = 13  # tokens in which layers take turns at them
FIRST = 4 + 32 + 128 + 16 - 1  # the first position whose keys are held
SETTINGS = {
    "plain": SHORT,
    "deltas": Event(hold=1),
    "keys": replace(SHORT, topk=1.0),
    "exact heads": replace(SHORT, topk=1.0, head_gap=0.2),
    "all heads": replace(SHORT, topk=1.0, head_gap=100.0),
    "by query": replace(SHORT, query_theta=1.2),
    "given again": replace(SHORT, delta_theta=0.5, stale_beta=0.95, stale_lambda=0.01),
    "stops early": Event(hold=1, topk=0.9, quorum=0.3, conv_eps=0.2, conv_j=2),
    "blocks": Event(hold=1, block="16", topk=0.2),
    "attn": replace(SHORT, target="attn"),
    "deltas everywhere": Event(deltas="all", hold=1, topk=0.5, age_max=8),
    "deltas of the mlp": Event(deltas="all", hold=1, topk=0.5, target="mlp"),
    "seed": Event(form="seed", hold=1, topk=0.6),
    "seed attn": Event(form="seed", hold=1, topk=0.3, target="attn", block="16"),
}
NAMES = pytest.mark.parametrize("name", SETTINGS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_hf(
        tmp_path_factory.mktemp("event") / "llama", "llama", hidden_size=128, head_dim=32, eos_token_id=None,
        max_position_embeddings=512,
    )  # fmt: skip


def opened(directory, *modes, quant: str = "f32", kv: str = "f16", **guard) -> LM:
    return ralo.load(directory, quant, kv, setup=Setup(compose(modes), GuardOptions(**guard)))


def decoded(lm: LM, seq: Sequence | None = None, tokens=TOKENS[:-1], dense: bool = False) -> np.ndarray:
    seq = lm.new_sequence() if seq is None else seq
    return np.stack([lm.model.step(t, seq, dense) for t in tokens])


def taken(lm: LM, layer: int = 0) -> dict[str, str]:
    return {place: occupant.mode for place, occupant in lm.model.slots[layer].taken.items()}


# ---------------------------------------------------------------- invariants


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_off_point_is_dense_bit_for_bit(directory, quant):
    dense = decoded(opened(directory, quant=quant))
    for off in (Event.off(), Event(on="off"), Event(target="mlp")):
        lm = opened(directory, off, quant=quant)
        assert not lm.model.has_modes and np.array_equal(decoded(lm), dense)
    for off in (Event(topk=1.0), replace(SHORT, topk=1.0, min_ctx=221), replace(SHORT, topk=1.0, keys=300)):
        lm = opened(directory, off, quant=quant)
        assert taken(lm) == {"attend": "event"} and np.array_equal(decoded(lm), dense)


@NAMES
def test_on_differs_from_dense_and_dense_does_not_change(directory, name):
    dense, lm = decoded(opened(directory)), opened(directory, SETTINGS[name])
    ours = decoded(lm)
    assert np.array_equal(decoded(lm, dense=True), dense)
    same = (ours == dense).all(axis=1)
    if "attend" not in taken(lm) or "o" in taken(lm):
        assert not same[5:].any()
    else:
        assert same[:FIRST].all() and not same[FIRST + 1 :].any()


@NAMES
def test_evaluation_is_what_decoding_gives(directory, name):
    """Several tokens at once, with the mode's state, equal the same tokens one by one. In one text of three a choice
    between equals may fall the other way, which the tokens after it show."""
    lm = opened(directory, SETTINGS[name])
    texts = [np.random.default_rng(seed).integers(2, 97, 221).tolist() for seed in (4, 5, 6)]
    off = np.abs([losses(lm.model, t, 220, lm.kv) - nll(decoded(lm, tokens=t[:-1]), np.asarray(t[1:])) for t in texts])
    assert np.median((off > 2e-3).mean(axis=1)) < 0.05 and np.median(off.mean(axis=1)) < 1e-4


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
@NAMES
def test_what_is_skipped_is_what_dense_reads_more(directory, name, quant):
    """What choices of keys read besides, included."""
    lm = opened(directory, SETTINGS[name], quant=quant)
    start = lm.model.bytes_read
    decoded(lm)
    middle = lm.model.bytes_read
    decoded(lm, dense=True)
    assert lm.metrics()["event.bytes_skipped"] == (lm.model.bytes_read - middle) - (middle - start)


@NAMES
def test_clones_go_on_alike(directory, name):
    lm = opened(directory, SETTINGS[name])
    seq = lm.new_sequence()
    decoded(lm, seq, TOKENS[:200])
    copy = seq.clone()
    assert sum(state.nbytes for state in copy.states) > 0
    assert np.array_equal(decoded(lm, seq, TOKENS[200:210]), decoded(lm, copy, TOKENS[200:210]))


@pytest.mark.parametrize("name", ["keys", "exact heads", "all heads"])
def test_trimming_takes_back_what_came_after(directory, name):
    lm = opened(directory, SETTINGS[name])
    seq, fresh = lm.new_sequence(), lm.new_sequence()
    decoded(lm, seq, TOKENS[:210])
    decoded(lm, fresh, TOKENS[:201])
    seq.trim(201)
    assert np.array_equal(decoded(lm, seq, TOKENS[:20]), decoded(lm, fresh, TOKENS[:20]))


@pytest.mark.parametrize("name", ["deltas", "seed", "blocks"])
def test_after_trimming_a_map_starts_with_the_whole(directory, name):
    """As a text that was read densely does."""
    lm = opened(directory, SETTINGS[name])
    seq, fresh = lm.new_sequence(), lm.new_sequence()
    for text in (seq, fresh):
        lm.model.prefill(TOKENS[:20], text, dense=True)
    decoded(lm, seq, TOKENS[20:30])
    seq.trim(20)
    assert np.array_equal(decoded(lm, seq, TOKENS[50:60]), decoded(lm, fresh, TOKENS[50:60]))


@NAMES
def test_two_texts_do_not_disturb_each_other(directory, name):
    lm = opened(directory, SETTINGS[name])
    a, b = lm.new_sequence(), lm.new_sequence()
    turns = np.stack([(lm.model.step(t, a), lm.model.step(u, b))[0] for t, u in zip(TOKENS, TOKENS[::-1], strict=True)])
    assert np.array_equal(turns, decoded(lm, tokens=TOKENS))


def test_metrics(directory):
    lm = opened(directory, SHORT)
    decoded(lm)
    m, layers = lm.metrics(), lm.layer_metrics()
    budget = {"event.budget_ms_used", "event.level"}
    assert {name for name in m if name.startswith("event.")} == {f"event.{name}" for name in Event.metrics} - budget
    assert m["event.enabled"] == 1 and 0 < m["event.topk_kept"] < 1 and 0 < m["event.stale_pct"] < 100
    assert len(layers) == 2 and sum(x["event.bytes_skipped"] for x in layers) == m["event.bytes_skipped"] > 0
    assert m["guard.nonfinite"] == 0
    inputs = [slots.o.counts() for slots in lm.model.slots]
    keys = [slots.attend.counts() for slots in lm.model.slots]
    sent, channels = (sum(c[name] for c in inputs) for name in ("sent", "channels"))
    kept, heads, held = (sum(c[name] for c in keys) for name in ("kept", "heads", "held"))
    assert m["event.topk_kept"] == (sent + kept) / (channels + sum(c["keys"] for c in keys))
    assert m["event.stale_pct"] == pytest.approx(100 * (channels - sent + held) / (channels + heads))
    assert channels == 2 * 220 * 128 and heads == 2 * 220 * 2 and held > 0


def test_metrics_under_a_budget(directory):
    lm = opened(directory, Event(budget_ms=1e4))
    lm.generate(TOKENS[:190], 20, temperature=0)
    m = lm.metrics()
    assert {name for name in m if name.startswith("event.")} == {f"event.{name}" for name in Event.metrics}
    turns = [13, 13, *(level for t in range(1, TURNS) for level in (t, t + 1))]
    assert 0 < m["event.budget_ms_used"] < 1e4 and m["event.level"] == pytest.approx(sum(turns) / (2 * 19))


def test_stopping_early_is_counted(directory):
    lm = opened(directory, SETTINGS["stops early"])
    decoded(lm)
    hits = lm.metrics()["event.quorum_hits"]
    assert 0 < hits <= 2 * 220 and hits == sum(slots.o.counts()["quorum_hits"] for slots in lm.model.slots)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "turns"),
    [(2, 1, ((0,), (4,))), (3, 1, ((0,), (2,), (5,))), (2, 2, ((0, 2), (4, 6))), (3, 2, ((0, 1), (2, 4), (5, 6)))],
)
def test_layers_and_heads_take_turns_with_their_choices(tmp_path, layers, kv_heads, turns):
    """Of eight tokens one chooses for each head, at the first all do."""
    model = write_hf(
        tmp_path / "llama", "llama", num_hidden_layers=layers, num_key_value_heads=kv_heads, max_position_embeddings=256
    )
    lm = opened(model, replace(SHORT, topk=1.0))
    seq = lm.new_sequence()
    lm.model.prefill(TOKENS[:200], seq, dense=True)
    made = []
    for token in TOKENS[200:217]:
        lm.model.step(token, seq)
        made.append([int(slots.attend.counts()["choices"]) for slots in lm.model.slots])
    due = [[sum((t - turn) % 8 == 0 for turn in of_layer) for of_layer in turns] for t in range(1, 17)]
    assert made[0] == [kv_heads] * layers and np.diff(made, axis=0).tolist() == due


@pytest.mark.parametrize("verify", ["off", "on"])
def test_drafts_hold_all_heads(directory, verify):
    """However wrong they are, as long as they are verified."""
    lm = opened(directory, replace(SHORT, topk=1.0, head_gap=0.0, verify=verify))
    decoded(lm)
    for slots in lm.model.slots:
        counts = slots.attend.counts()
        free = 2 * (220 - FIRST) - counts["choices"]
        assert counts["held"] == free if verify == "on" else 0 < counts["held"] < 0.3 * free  # until an error is known


def test_prompts_are_dense(directory):
    lm = opened(directory, SHORT)
    dense = lm.model.prefill(TOKENS, lm.new_sequence(), dense=True)
    assert np.array_equal(lm.model.prefill(TOKENS, lm.new_sequence()), dense)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "opt", "gpt2"])
def test_every_architecture(tmp_path, kind):
    longer = {"n_positions": 256} if kind == "gpt2" else {"max_position_embeddings": 256}
    longer |= {"sliding_window": 200} if kind == "mistral" else {}
    lm = opened(write_hf(tmp_path / kind, kind, **longer), SHORT)
    assert np.isfinite(decoded(lm)).all() and lm.metrics()["event.bytes_skipped"] > 0
    assert lm.metrics()["guard.nonfinite"] == 0


@pytest.mark.parametrize("place", ["o", "attend"])
def test_a_planted_nan_is_caught_and_counted(directory, place):
    lm = opened(directory, SHORT)
    seq = lm.new_sequence()
    decoded(lm, seq, TOKENS[:200])
    lm.model.slots[1].taken[place].slot.plant = True
    assert np.isfinite(decoded(lm, seq, TOKENS[200:210])).all() and lm.metrics()["guard.nonfinite"] == 1


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"verify": "on", "budget_ms": 5.0},
            "--event-verify and --event-budget-ms do not go together: a verified token takes its time",
        ),
        ({"record": "levels"}, "--event-record and --event-replay need --event-budget-ms"),
        ({"replay": "levels"}, "--event-record and --event-replay need --event-budget-ms"),
    ],
)
def test_wrong_settings_are_said_in_one_line(settings, said):
    with pytest.raises(RaloError) as error:
        Event(**settings)
    assert str(error.value) == said


def test_overrides_hold_where_they_say(directory):
    where = (
        Override(None, None, {"on": "off"}),
        Override(frozenset({1}), frozenset({"o"}), {"on": "on", "topk": 0.25, "keys": 8}),
    )
    lm = opened(directory, replace(SHORT, where=where))
    assert taken(lm) == {} and taken(lm, 1) == {"o": "event", "attend": "event"}
    decoded(lm)
    first, second = lm.layer_metrics()
    assert first == {} and second["event.bytes_skipped"] == lm.metrics()["event.bytes_skipped"] > 0
    counts = lm.model.slots[1].o.counts()
    assert counts["sent"] == 128 * counts["whole"] + 32 * (counts["steps"] - counts["whole"])
    with pytest.raises(RaloError, match=r"\[\[event.where\]\] names layer 7, the model has 2"):
        opened(directory, Event(where=(Override(frozenset({7}), None, {"topk": 1.0}),)))


def test_overrides_by_site_leave_the_others(directory):
    where = (Override(None, frozenset({"qkv", "up"}), {"on": "off"}), Override(frozenset({0}), None, {"hold": 1}))
    lm = opened(directory, Event(budget_ms=100, where=where))
    assert sorted(taken(lm)) == ["down", "o"] and sorted(taken(lm, 1)) == ["attend", "down", "o"]


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({}, {"o"}),
        ({"deltas": "all"}, {"qkv", "o", "up", "down"}),
        ({"deltas": "all", "target": "attn"}, {"qkv", "o"}),
        ({"deltas": "all", "target": "mlp"}, {"up", "down"}),
        ({"deltas": "o", "target": "mlp"}, set()),
        ({"deltas": "o", "budget_ms": 100}, {"qkv", "o", "up", "down"}),
        ({"form": "seed"}, {"qkv", "o", "up", "down"}),
    ],
    ids=str,
)
def test_which_maps_are_kept_by_deltas(directory, settings, places):
    """Under a budget the others send what the level lets them, anew for every token."""
    lm = opened(directory, Event(hold=1, **settings))
    assert taken(lm) == taken(lm, 1) == dict.fromkeys(places, "event")
    said = {place: runs(lm, "0", place) for place in places}
    tracked = {place for place in places if said[place].startswith("event: deltas, ")}
    assert tracked == ({"o"} & places if settings.get("deltas", "o") == "o" else places) - (
        places if "form" in settings else set()
    )


def test_topk_decides_how_much_is_sent(directory):
    for topk, share in ((0.4, 0.5), (0.8, 0.83), (0.1, 0.25)):
        lm = opened(directory, Event(topk=topk, hold=1, delta_theta=0.0, quorum=1.0, age_max=1 << 20))
        decoded(lm)
        counts = lm.model.slots[0].o.counts()
        assert (counts["sent"] - 128) / (counts["channels"] - 128) == pytest.approx(share, abs=0.01)


# ---------------------------------------------------------------- with other modes


def test_kwta_proposes_and_event_sends(directory):
    lm = opened(directory, KWTA(k=0.1), Event(topk=0.9, hold=1))
    assert taken(lm) == {"qkv": "kwta", "o": "event", "up": "kwta", "down": "kwta"}
    assert lm.model.slots[0].taken["o"].share == pytest.approx(0.25, abs=0.01)  # what kwta would have let win
    assert runs(lm, "0", "o") == "event: deltas, 0.25 of channels of the 0.25 proposed by kwta"
    decoded(lm)
    counts = lm.model.slots[0].o.counts()
    assert counts["sent"] <= 128 * counts["whole"] + 0.26 * 128 * (counts["steps"] - counts["whole"])
    assert {"kwta.keep_ratio", "event.topk_kept"} <= lm.metrics().keys()
    less = opened(directory, KWTA(k=0.9), Event(topk=0.1, hold=1))
    assert less.model.slots[0].taken["o"].share == pytest.approx(0.25, abs=0.01)
    assert runs(less, "0", "o") == "event: deltas, 0.25 of channels of the 0.91 proposed by kwta"


def test_a_place_whose_winners_vary_stays_kwtas(directory):
    for kwta in (KWTA(k=0.4, duty=4), KWTA(p=0.8)):
        assert taken(opened(directory, kwta, Event(hold=1)))["o"] == "kwta"


def test_statepack_keeps_the_keys(directory):
    pack = StatePack(target="kv", min_ctx=0, recent=8, keys=16)
    lm = opened(directory, pack, SHORT)
    assert taken(lm) == {"attend": "state-pack", "o": "event"}
    assert any(note.startswith("state-pack chooses keys instead of event") for note in lm.plan.notes)
    decoded(lm)
    assert {"pack.density", "event.topk_kept"} <= lm.metrics().keys()
    assert taken(opened(directory, StatePack(target="mlp", rho=0.3), SHORT)).get("attend") == "event"


TOGETHER = {
    "gate first": (KWTA(k=0.4, gate="on"),),
    "channels": (KWTA(k=0.4, gate="off"),),
    "its keys": (KWTA(k=0.9, keys=0.3, keys_min=8),),
    "packed keys": (StatePack(min_ctx=0, recent=8, keys=16, rho=0.2),),
    "all three": (StatePack(target="mlp", rho=0.2), KWTA(k=0.5)),
}


@pytest.mark.parametrize("act", ["silu", "relu"])
@pytest.mark.parametrize("name", TOGETHER)
def test_what_all_modes_skip_is_what_dense_reads_more(tmp_path, name, act):
    """Under a budget, where event has something to say at every place; at levels that are neither all nor nothing."""
    model, file = write_hf(tmp_path / act, "llama", hidden_act=act, max_position_embeddings=256), tmp_path / "levels"
    file.write_text("ralo event schedule\n" + "58\n" * 220)
    lm = opened(model, *TOGETHER[name], replace(SHORT, budget_ms=5.0, replay=str(file)), quant="int8")
    start = lm.model.bytes_read
    assert np.isfinite(decoded(lm)).all()
    middle = lm.model.bytes_read
    decoded(lm, dense=True)
    skipped = [value for metric, value in lm.metrics().items() if metric.endswith(".bytes_skipped")]
    assert sum(skipped) == (lm.model.bytes_read - middle) - (middle - start) > 0


def test_explained(directory):
    lm = opened(directory, SHORT)
    keys = "event: 16 keys held for 8 tokens from 0 on"
    assert runs(lm, "0", "o") == f"event: deltas, 0.50 of channels; {keys}" and runs(lm, "0", "qkv") == "dense"
    lm = opened(directory, Event(budget_ms=100))
    assert runs(lm, "1", "qkv") == "event: 1.00 to 0.73 of channels"
    assert runs(lm, "1", "down") == "event: 1.00 to 0.25 of channels"


# ---------------------------------------------------------------- a budget


def paced(directory, **settings) -> LM:
    return opened(directory, Event(**{"budget_ms": 1e5, "keys": 16, "min_ctx": 0, "hold": 8} | settings), on="off")


def test_a_budget_with_plenty_of_time_is_dense_bit_for_bit(directory):
    """Once it is known what a layer takes: the first tokens are not yet by the clock."""
    lm = paced(directory)
    assert not np.array_equal(decoded(lm, tokens=TOKENS[:TURNS]), decoded(lm, tokens=TOKENS[:TURNS], dense=True))
    assert np.array_equal(decoded(lm), decoded(lm, dense=True))
    turns = [bytes([13, 13]), *(bytes([t, t + 1]) for t in range(1, TURNS))]
    assert lm.model.pace.schedule == turns + [bytes(2)] * 220
    assert lm.model.pace.note == ""


def test_a_budget_that_cannot_be_kept_does_the_least(directory):
    lm = paced(directory, budget_ms=1e-3)
    made = lm.generate(TOKENS[:190], WARM + 8, temperature=0)
    levels = lm.model.pace.schedule
    assert len(made.tokens) == WARM + 8 and levels[0] == bytes([13, 13])
    assert {x for token in levels[TURNS:] for x in token} == {13} and len(levels) == WARM + 7
    assert (
        lm.model.pace.note.startswith("budget 0.001 ms is less than the ") and "of the least work" in lm.model.pace.note
    )
    assert lm.metrics()["event.bytes_skipped"] > 0
    assert not np.array_equal(decoded(lm, tokens=TOKENS[:9]), decoded(lm, tokens=TOKENS[:9], dense=True))


def test_a_schedule_has_every_token_and_layer(directory, tmp_path):
    lm = paced(directory, record=str(tmp_path / "levels"))
    lm.generate(TOKENS[:190], 18, temperature=0)
    pace = lm.model.pace
    assert [len(levels) for levels in pace.schedule] == [2] * 17  # the first token is of the prompt's own pass
    pace.save()
    assert read_schedule(tmp_path / "levels", 2, len(LEVELS)) == pace.schedule


@pytest.mark.parametrize("budget_ms", [1e-3, 0.3, 1e5])
@pytest.mark.parametrize("quant", ["f32", "int8"])
def test_a_replay_gives_the_same_tokens_and_the_same_bits(directory, tmp_path, quant, budget_ms):
    """With any levels at all, and whatever the clock says."""
    levels = tmp_path / "levels"
    settings = {"budget_ms": budget_ms, "keys": 16, "min_ctx": 0, "hold": 8}
    texts, scores = [], []
    for more in ({"record": str(levels)}, {"replay": str(levels)}):
        lm = opened(directory, Event(**settings, **more), quant=quant, on="off")
        texts.append(lm.generate(TOKENS[:190], 40, temperature=1.0, seed=3).tokens)
        scores.append(decoded(lm, tokens=TOKENS[:30]))
        lm.model.pace.save()
    assert texts[0] == texts[1] and np.array_equal(*scores)
    with pytest.raises(RaloError, match="the recorded schedule ends after"):
        lm.model.step(5, lm.new_sequence())


def test_a_replay_under_guard(directory, tmp_path):
    """Comparisons with dense come at the same tokens, and switch the mode off and on at the same ones."""
    levels, scores, events = tmp_path / "levels", [], []
    for more in ({"record": str(levels)}, {"replay": str(levels)}):
        lm = opened(directory, Event(budget_ms=0.3, gap_every=16, **more))
        seq = lm.new_sequence()
        scores.append(np.stack([lm.guard.step(token, seq) for token in TOKENS[:150]]))
        events.append(lm.guard.events)
        lm.model.pace.save()
        assert lm.guard.counts["checks"] == 9
    assert np.array_equal(*scores) and events[0] == events[1]


def test_levels_that_were_made_up_are_replayed(directory, tmp_path):
    """Every level is reached, and a level of all of the work is dense there."""
    file = tmp_path / "levels"
    file.write_text("ralo event schedule\n" + "".join(f"{a}{b}\n" for a in LEVELS for b in "6c"))
    first, second = (decoded(paced(directory, replay=str(file)), tokens=TOKENS[:26]) for _ in range(2))
    assert np.array_equal(first, second)
    file.write_text("ralo event schedule\n" + "00\n" * 26)
    lm = paced(directory, replay=str(file))
    assert np.array_equal(decoded(lm, tokens=TOKENS[:26]), decoded(lm, tokens=TOKENS[:26], dense=True))
    assert not np.array_equal(first, decoded(lm, tokens=TOKENS[:26], dense=True))


def test_a_schedule_of_another_model_is_refused(directory, tmp_path):
    file = tmp_path / "levels"
    file.write_text("ralo event schedule\n000\n")
    with pytest.raises(RaloError, match="is not a schedule of 2 layers and 14 levels"):
        paced(directory, replay=str(file))


def at_levels(directory, file, **settings) -> list[tuple[int, float]]:
    """By level: bytes read by some tokens of a long text, and heads that held their keys."""
    found = []
    for level in LEVELS:
        file.write_text("ralo event schedule\n" + f"{level}{level}\n" * 200)
        lm = paced(directory, replay=str(file), **settings)
        seq = lm.new_sequence()
        lm.model.prefill(TOKENS[:190], seq, dense=True)
        before = lm.model.bytes_read
        decoded(lm, seq, TOKENS[190:220])
        held = sum(slots.attend.counts()["held"] for slots in lm.model.slots)
        found.append((lm.model.bytes_read - before, held))
    return found


def test_less_is_read_at_every_level(directory, tmp_path):
    read = [n for n, _ in at_levels(directory, tmp_path / "levels", head_gap=100.0)]
    assert read == sorted(read, reverse=True) and read[0] > read[1] == read[2] == read[3]
    assert len(set(read[3:])) == 11 and read[-1] < 0.8 * read[0]


def test_heads_hold_their_keys_before_less_is_sent(directory, tmp_path):
    """None at the first level, then those that are served, then more, then all."""
    held = [n for _, n in at_levels(directory, tmp_path / "levels", head_gap=0.25)]
    assert held[0] == 0 < held[1] < held[2] < held[3] and len(set(held[3:])) == 1


def test_without_a_budget_nobody_keeps_the_time(directory):
    assert opened(directory, SHORT).model.pace is None
    assert isinstance(paced(directory).model.pace.pacer, _core.Pacer)
