"""A coarser head: the scores of the model that has it, the model's own wherever dense is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commandline import refused
from test_mix import INFINITE, NAN, at_int4, bytes_of, damage
from test_proc import TOKENS, decoded, opened, write_model
from test_texts import LENGTHS, assert_as_alone, begun

import ralo
from ralo import Mix
from ralo.cli import main
from ralo.commands.explain import plan
from ralo.compose import compose
from ralo.lm import LM
from ralo.memory import Arena
from ralo.mix.matrix import CoarseMatrix, rounded
from ralo.model import Model
from ralo.modes.base import Override
from ralo.quality import losses, nll
from ralo.tune.costs import coarse_weights, head_kl
from ralo.tune.sites import Option, modes_of
from ralo.tune.trial import packed_bytes
from ralo.weights import PLACES

WORDS = "the house was old and the people were few " * 200
ALONE = Mix(head="on", where=(Override(None, frozenset(PLACES), {"on": "off"}),))  # no layer is coarser


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("head") / "model")


@pytest.fixture(scope="module")
def flags(model: Path) -> tuple[str, ...]:
    text = model.with_name("words.txt")
    text.write_text(WORDS)
    return ("-m", str(model), "--text", str(text), "--tokens", "1024", "--mix", "on")


@pytest.fixture(scope="module")
def made(model: Path, flags: tuple[str, ...]) -> Path:
    to = model.with_name("pack")
    assert main(["pack", *flags, "--mix-head", "on", "-o", str(to)]) == 0
    return to


def with_coarse_head(lm: LM) -> LM:
    weights = replace(lm.model.weights, head=rounded(lm.model.weights.head, "int4", Arena()))
    return LM(lm.path, Model(lm.model.cfg, weights), lambda: lm.tokenizer, lm.kv, lm.guard.options)


def test_it_is_the_model_with_that_head(model: Path) -> None:
    plain, alone, both = opened(model), opened(model, ALONE), opened(model, Mix(head="on"))
    dense = decoded(plain)
    assert np.array_equal(decoded(alone), decoded(with_coarse_head(plain)))
    assert np.array_equal(decoded(both), decoded(with_coarse_head(at_int4(plain))))
    assert not np.array_equal(decoded(both), decoded(opened(model, Mix())))
    for lm in (alone, both):
        assert np.array_equal(decoded(lm, dense=True), dense)
        whole = lm.model.prefill(TOKENS, lm.new_sequence(), dense=True)
        assert np.array_equal(lm.model.prefill(TOKENS, lm.new_sequence()), whole)
    assert set(alone.model.slots[-1].taken) == {"head_weights"} and not alone.model.slots[0].taken
    alone.use(compose([]))
    assert np.array_equal(decoded(alone), dense) and not alone.model.has_modes


def test_off_and_heads_that_are_as_coarse_stay_as_they_are(model: Path) -> None:
    for lm in (opened(model, Mix()), opened(model, Mix(head="on", quant="int8"))):
        assert all("head_weights" not in slots.taken for slots in lm.model.slots)


def test_what_is_read_and_shown(model: Path) -> None:
    lm = opened(model, ALONE)
    own, slot = lm.model.weights.head, lm.model.slots[-1].taken["head_weights"].slot
    assert own.nbytes > slot.matrix.nbytes
    assert bytes_of(lm, dense=True) - bytes_of(lm) == len(TOKENS[:-1]) * (own.nbytes - slot.matrix.nbytes)
    assert lm.metrics()["mix.enabled"] == 1
    assert lm.metrics()["mix.mem_ratio"] == slot.matrix.nbytes / own.nbytes
    assert packed_bytes(lm.model) == lm.model.weights.nbytes - own.nbytes + slot.matrix.nbytes
    *layers, head = plan(lm)
    assert all(row["runs"] == "dense" for row in layers)
    assert (head["matrix"], head["runs"], head["bytes"]) == ("head", "mix: int4", slot.matrix.nbytes)


def test_texts_together_are_as_alone(model: Path) -> None:
    lm = opened(model, Mix(head="on"))
    assert_as_alone(lm.model, begun(lm.model, LENGTHS[:5]))
    assert_as_alone(lm.model, begun(lm.model, LENGTHS[:3]), dense=[False, True, False])


def test_quality_is_of_what_decoding_gives(model: Path) -> None:
    lm = opened(model, ALONE)
    step_by_step = nll(decoded(lm), np.array(TOKENS[1:]))
    np.testing.assert_allclose(losses(lm.model, TOKENS, 64), step_by_step, atol=2e-3)
    assert np.abs(step_by_step - nll(decoded(lm, dense=True), np.array(TOKENS[1:]))).max() > 1e-2


@pytest.mark.parametrize("scale", [NAN, INFINITE], ids=["nan", "inf"])
def test_scores_that_are_not_finite_are_the_models_own_and_are_counted(model: Path, scale: int) -> None:
    lm = opened(model, ALONE)
    dense = decoded(lm, dense=True)
    bad = damage(lm, -1, "head", scale)
    assert np.array_equal(decoded(lm), dense) and bad.nonfinite == len(dense)
    texts = begun(lm.model, LENGTHS[:3])
    assert np.isfinite(assert_as_alone(lm.model, texts, rounds=1)).all()


def test_switched_off_it_is_dense(model: Path) -> None:
    lm = opened(model, ALONE)
    dense = decoded(lm, dense=True)
    lm.model.slots[-1].taken["head_weights"].slot.on = False
    assert np.array_equal(decoded(lm), dense)


def test_a_pack_by_itself_and_beside_its_model(model: Path, made: Path) -> None:
    alone = ralo.load(made)
    assert isinstance(alone.model.weights.head, CoarseMatrix) and alone.model.weights.head.quant == "int4"
    beside = ralo.load(model, modes=[Mix(pack=str(made), head="on")])
    assert np.array_equal(decoded(alone), decoded(beside))
    assert beside.metrics()["mix.enabled"] == 4 * beside.model.cfg.n_layers + 1
    layers = ralo.load(model, modes=[Mix(pack=str(made))])
    assert layers.metrics()["mix.enabled"] == 4 * layers.model.cfg.n_layers
    assert not np.array_equal(decoded(layers), decoded(beside))


def test_it_makes_up_for_its_rounding(model: Path, made: Path) -> None:
    """On text of the kind that it was made for."""
    lm = ralo.load(model)
    x = lm.model.forward(lm.encode(WORDS)[1024:1500], lm.new_sequence())
    want = lm.model.weights.head(x)
    only, better = rounded(lm.model.weights.head, "int4", Arena()), ralo.load(made).model.weights.head
    assert np.linalg.norm(better(x) - want) < 0.95 * np.linalg.norm(only(x) - want)


def test_a_pack_without_one_is_refused(
    model: Path, flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "plain"
    assert main(["pack", *flags, "-o", str(to)]) == 0
    capsys.readouterr()
    line = refused(capsys, "run", "-m", model, "--mix-pack", to, "--mix-head", "on", "-p", "the")
    assert "was made with --mix-head=off, not on: pack the model again" in line
    assert Mix(pack=str(to)).has_head() is False


def test_tuning_sees_it(model: Path, made: Path) -> None:
    lm = opened(model)
    for mix in (Mix(), Mix(pack=str(made))):
        _, head = coarse_weights(lm, mix)
        assert head is not None and head.quant == "int4"
        assert head_kl(lm, head, TOKENS) > 0
        assert not lm.model.has_modes
    fine, coarse = Option("int8", 1.0), Option("int4", 1.0)
    places = {(i, place): fine for i in range(2) for place in PLACES}
    (only,) = modes_of({**places, (1, "head"): coarse}, "int8", Mix())
    assert isinstance(only, Mix) and only.head == "on"
    assert set(opened(model, only).model.slots[-1].taken) == {"head_weights"}
    (layers_only,) = modes_of({**dict.fromkeys(places, coarse), (1, "head"): fine}, "int8", Mix())
    assert isinstance(layers_only, Mix) and layers_only.head == "off" and layers_only.where == ()
