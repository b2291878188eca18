"""The head by halves: scores of likely tokens as whole weights give them, the others nearly so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commandline import refused
from reference import halves
from test_mix import bytes_of
from test_proc import TOKENS, decoded, opened, write_model
from test_texts import LENGTHS, assert_as_alone, begun

import ralo
from ralo import KWTA, Mix, profile
from ralo.commands.explain import plan
from ralo.compose import compose
from ralo.lm import LM
from ralo.memory import Arena
from ralo.modes import kwta
from ralo.modes.base import LayerSlots
from ralo.profile import Profile
from ralo.quality import losses, nll
from ralo.remake.values import values

HEAD = KWTA(k=1.0, gate="off", head="on")  # nothing else is skipped
LEAST = 0.012  # of 97 tokens about a third
FINE = 6  # of 128 channels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("kwta-head") / "model")


@pytest.fixture(autouse=True)
def a_third_is_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kwta, "LIKELY", LEAST)
    monkeypatch.setattr(kwta, "HEAD_FINE", FINE / 128)


def hidden(lm: LM) -> np.ndarray:
    return lm.model.forward(TOKENS[:-1], lm.new_sequence(), dense=True)


def shares(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def slot_of(lm: LM) -> ralo._core.KwtaHead:
    slot = lm.model.slots[-1].taken["head"].slot
    assert isinstance(slot, ralo._core.KwtaHead)
    return slot


def test_likely_tokens_have_the_scores_of_whole_weights(model: Path) -> None:
    lm = opened(model, HEAD)
    dense, found = decoded(lm, dense=True), decoded(lm)
    sure = shares(dense) > 1.5 * LEAST  # on this side of the bound whatever half of the bits say
    sound = 0.01 * np.abs(dense).max()  # weights are rounded to int8 once more
    assert 20 < sure.sum() < 0.5 * sure.size
    off = np.abs(found - dense)
    assert off[sure].max() < sound < off.max()
    assert np.median(off[shares(dense) < LEAST / 2]) > 2 * np.median(off[sure])


def test_scores_are_those_of_the_two_references(model: Path) -> None:
    """Halves with some channels whole, and single rows of the head that was turned."""
    lm = opened(model, HEAD)
    head, x, found = lm.model.weights.head, hidden(lm), decoded(lm)
    rows, (upper, lower) = head.turned("head", Arena()), halves.split(head.data)
    every = np.arange(head.ic, dtype=np.uint32)
    whole = x @ values(rows.quant, rows.data, rows.scales)[:, : head.ic].T
    size = np.abs(values(head.quant, head.data, head.scales))
    rough = np.empty_like(whole)
    for t, row in enumerate(x):
        fine = np.sort(np.argsort(-np.abs(row) * np.sqrt((size**2).sum(axis=1)))[:FINE]).astype(np.uint32)
        rough[t] = halves.apply(upper, lower, head.scales, row, every, fine)[: whole.shape[1]]
    likely, unlikely = shares(rough) > 1.1 * LEAST, shares(rough) < LEAST / 1.1
    assert likely.mean() > 0.1 and unlikely.mean() > 0.3
    for which, want, near in ((likely, whole, 2e-3), (unlikely, rough, 2e-2)):  # beside halves x has one byte
        assert np.abs(found - want)[which].max() < near * np.abs(whole).max()
    assert np.abs(rough - whole).max() > 4e-2 * np.abs(whole).max()


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
def test_off_it_is_dense_bit_for_bit(model: Path, quant: str) -> None:
    plain = opened(model, quant=quant)
    dense = decoded(plain)
    for mode in (KWTA(k=1.0, gate="off"), KWTA(k=1.0, gate="off", head="off")):
        lm = opened(model, mode, quant=quant)
        assert "head" not in lm.model.slots[-1].taken and np.array_equal(decoded(lm), dense)
    if quant in ("int8", "int4"):  # both have a head of int8
        lm = opened(model, HEAD, quant=quant)
        assert not np.array_equal(decoded(lm), dense) and np.array_equal(decoded(lm, dense=True), dense)
        slot_of(lm).on = False
        assert np.array_equal(decoded(lm), dense)
        lm.use(compose([]))
        assert np.array_equal(decoded(lm), dense) and not lm.model.has_modes


def test_what_is_skipped_is_what_dense_reads_more(model: Path) -> None:
    lm = opened(model, HEAD)
    skipped = bytes_of(lm, dense=True) - bytes_of(lm)
    metrics = lm.metrics()
    assert metrics["kwta.bytes_skipped"] == skipped
    assert 10 < metrics["kwta.scores"] < 60
    counts = slot_of(lm).counts()
    assert (counts["head_steps"], counts["steps"], counts["fine"]) == (60, 60, 60 * FINE)
    tile, whole, row = 128 * (64 // 2 + 2), 128 + 2 * 2, 128 + 2 * 2  # 128 channels and as many outputs; one of either
    assert counts["bytes_read"] == 60 * (2 * tile + FINE * whole) + counts["likely"] * row


def test_quality_is_of_what_decoding_gives(model: Path) -> None:
    lm = opened(model, HEAD)
    step_by_step = nll(decoded(lm), np.array(TOKENS[1:]))
    off = losses(lm.model, TOKENS, 64) - step_by_step  # several tokens have more than a byte beside halves
    assert np.abs(off).max() < 3e-2 and abs(off.mean()) < 3e-3
    assert np.abs(step_by_step - nll(decoded(lm, dense=True), np.array(TOKENS[1:]))).max() > 5e-2


def test_texts_together_are_as_alone(model: Path) -> None:
    lm = opened(model, HEAD)
    assert_as_alone(lm.model, begun(lm.model, LENGTHS[:5]))
    assert_as_alone(lm.model, begun(lm.model, LENGTHS[:3]), dense=[False, True, False])


def test_trimmed_and_cloned_texts_go_on_alike(model: Path) -> None:
    lm = opened(model, HEAD)
    seq = lm.new_sequence()
    decoded(lm, seq, TOKENS[:20])
    copy = seq.clone()
    assert np.array_equal(decoded(lm, seq, TOKENS[20:30]), decoded(lm, copy, TOKENS[20:30]))
    seq.trim(20)
    assert np.array_equal(decoded(lm, seq, TOKENS[20:30]), decoded(lm, lm_at(lm, 20), TOKENS[20:30]))


def lm_at(lm: LM, length: int) -> ralo.sequence.Sequence:
    seq = lm.new_sequence()
    decoded(lm, seq, TOKENS[:length])
    return seq


def test_a_planted_nan_is_dense_and_counted(model: Path) -> None:
    lm = opened(model, HEAD)
    seq, dense = lm.new_sequence(), decoded(lm, dense=True)
    slot_of(lm).plant = True
    assert np.array_equal(lm.model.step(TOKENS[0], seq), dense[0]) and slot_of(lm).nonfinite == 1
    assert np.isfinite(lm.model.step(TOKENS[1], seq)).all() and slot_of(lm).nonfinite == 1


@pytest.mark.parametrize("least, scored", [(1.0, 0), (1e-9, 97)])
def test_none_and_all_are_likely(model: Path, least: float, scored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kwta, "LIKELY", least)
    lm = opened(model, HEAD)
    decoded(lm)
    assert lm.metrics()["kwta.scores"] == scored


def test_where_k_is_below_1_it_is_on_by_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(mode: KWTA, quant: str = "int8") -> bool:
        lm = opened(model, mode, quant=quant)
        return "head" in lm.model.slots[-1].taken

    assert not takes(KWTA(k=0.5))  # of so few tokens too many are likely
    monkeypatch.setattr(kwta, "MANY", 97)
    assert takes(KWTA(k=0.5)) and takes(KWTA(k=0.5), quant="int4")
    assert not takes(KWTA(k=0.5), quant="bf16")
    for other in (
        {"k": 1.0},
        {"head": "off"},
        {"target": "mlp"},
        {"form": "seed"},
        {"fine": 1.0},
        {"duty": 2},
        {"p": 0.9},
    ):
        assert not takes(KWTA(**{"k": 0.5, "gate": "off", **other}))
    assert takes(KWTA(k=1.0, head="on", target="mlp", gate="off"))


def test_it_is_measured_whether_it_is_faster(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kwta, "MANY", 97)
    head = opened(model).model.weights.head
    assert KWTA(k=0.5)._takes_head(head, None, LayerSlots())
    for measured, takes in (((), True), ((2, 1), True), ((1, 2), False)):
        path = tmp_path / "known.profile"
        Profile("m", 1, {}, head=np.array(measured, np.float32)).save(path)
        known = profile.load(path)
        assert known.head.tolist() == list(measured)
        assert KWTA(k=0.5)._takes_head(head, known, LayerSlots()) is takes
        assert KWTA(k=0.5, head="on")._takes_head(head, known, LayerSlots())


def test_it_has_no_temperature(model: Path) -> None:
    assert opened(model, KWTA(k=0.5, temp=0.9, head="on")).metrics()["kwta.temp"] == pytest.approx(0.9)


def test_a_coarser_head_is_left_alone(model: Path) -> None:
    lm = opened(model, HEAD, Mix(head="on"))
    assert np.array_equal(decoded(lm), decoded(opened(model, Mix(head="on"))))
    assert lm.model.slots[-1].left["head"] == "kwta leaves it to mix"


@pytest.mark.parametrize("fine", [FINE, 3])
def test_it_is_shown(model: Path, fine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kwta, "HEAD_FINE", fine / 128)
    lm = opened(model, HEAD)
    (row,) = [row for row in plan(lm) if row["matrix"] == "head"]
    assert row["runs"] == f"kwta: by halves, {fine} of its channels whole; whole scores of tokens from {LEAST} on"
    head = lm.model.weights.head
    kept = lm.model.slots[-1].taken["head"].nbytes
    assert kept == head.tiles(Arena()).nbytes + head.turned("head", Arena()).nbytes < 1.6 * head.nbytes
    assert lm.model.nbytes == lm.model.weights.nbytes + kept


def test_heads_of_other_precisions_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "run", "-m", model, "--quant", "bf16", "--kwta-head", "on", "-p", "the")
    assert "--kwta-head=on reads an int8 head by halves, this one is bf16" in line
