"""ralo pack --mix: coarser weights that make up for their rounding, beside their model and by themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commandline import refused
from test_proc import decoded, write_model

import ralo
from ralo import KWTA, Mix
from ralo.cli import main
from ralo.compose import compose
from ralo.mix.matrix import CoarseMatrix
from ralo.remake.windows import Windows
from ralo.weights import PLACES

WORDS = "the house was old and the people were few " * 200


@pytest.fixture(scope="module")
def mix_model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("mix") / "model")


@pytest.fixture(scope="module")
def flags(mix_model: Path) -> tuple[str, ...]:
    text = mix_model.with_name("words.txt")
    text.write_text(WORDS)
    return ("-m", str(mix_model), "--text", str(text), "--tokens", "1024")


@pytest.fixture(scope="module")
def made(mix_model: Path, flags) -> Path:
    to = mix_model.with_name("pack")
    assert main(["pack", *flags, "--mix", "on", "-o", str(to)]) == 0
    return to


def test_by_itself_and_beside_its_model(mix_model, made):
    alone = ralo.load(made)
    assert all(isinstance(getattr(w, p), CoarseMatrix) for w in alone.model.weights.layers for p in PLACES)
    assert alone.storage == "int8 and int4"
    beside = ralo.load(mix_model, modes=[Mix(pack=str(made))])
    assert np.array_equal(decoded(alone), decoded(beside))
    assert beside.metrics()["mix.enabled"] == 4 * beside.model.cfg.n_layers
    assert alone.model.weights.nbytes < beside.model.weights.nbytes
    some = ralo.load(made, modes=[KWTA(k=0.6)])
    both = ralo.load(mix_model, modes=[Mix(pack=str(made)), KWTA(k=0.6)])
    assert np.array_equal(decoded(some), decoded(both)) and not np.array_equal(decoded(some), decoded(alone))


def test_channels_make_up_for_each_others_rounding(mix_model, made):
    """On inputs of the kind they were made for, products move less than those of weights that are only rounded."""
    lm = ralo.load(mix_model)
    packed = ralo.load(made).model.weights.layers
    lm.use(compose([Mix()]))
    layer, windows = lm.model.weights.layers[0], Windows.of(lm.model.cfg, lm.model.weights, lm.encode(WORDS)[1024:2048])
    x = np.concatenate(list(windows.normed(layer.attn_norm)))
    want = layer.qkv(x)
    slot = lm.model.slots[0].taken["qkv_weights"].slot
    rounded, made_for = (np.linalg.norm(m(x) - want) for m in (slot.matrix, packed[0].qkv))
    assert made_for < 0.8 * rounded


def test_a_plan_says_where(mix_model, flags, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[[mix.where]]\nlayers = "0"\nsites = "qkv,down"\non = "off"\n')
    to = tmp_path / "pack"
    assert main(["pack", *flags, "--plan", str(plan), "-o", str(to)]) == 0
    layers = ralo.load(to).model.weights.layers
    kinds = [{p: getattr(w, p).quant for p in PLACES} for w in layers]
    assert kinds[0] == {"qkv": "int8", "o": "int4", "up": "int4", "down": "int8"}
    assert all(set(kind.values()) == {"int4"} for kind in kinds[1:])
    beside = tmp_path / "run.toml"
    beside.write_text('[mix]\npack = "pack"\n')  # beside the plan, wherever one is
    lm = ralo.load(mix_model, plan=beside)
    assert lm.metrics()["mix.enabled"] == 4 * len(layers) - 2


def test_a_build_that_was_stopped_goes_on(flags, made, tmp_path, monkeypatch, capsys):
    from ralo.mix import pack as mix_pack

    calls, real = [], mix_pack.made_for

    def stop(*args):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(*args)

    to = tmp_path / "pack"
    monkeypatch.setattr(mix_pack, "made_for", stop)
    assert main(["pack", *flags, "--mix", "on", "-o", str(to)]) == 130 and not to.exists()
    monkeypatch.setattr(mix_pack, "made_for", real)
    assert main(["pack", *flags, "--mix", "on", "-o", str(to)]) == 0
    assert "1 layers were there already" in capsys.readouterr().out
    assert (to / "weights.safetensors").read_bytes() == (made / "weights.safetensors").read_bytes()


def test_what_does_not_go(mix_model, made, tmp_path, capsys):
    other = write_model(tmp_path / "other", seed=5)
    assert "is the pack of another model" in refused(capsys, "run", "-m", other, "--mix-pack", made, "-p", "the")
    assert "is not a pack" in refused(capsys, "run", "-m", mix_model, "--mix-pack", mix_model, "-p", "the")
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    info = json.loads((broken / "ralo.json").read_text())
    name = next(iter(info["mix"]["matrices"]))
    info["mix"]["matrices"][name]["digest"] = "0" * 32
    (broken / "ralo.json").write_text(json.dumps(info))
    assert "is damaged" in refused(capsys, "run", "-m", broken, "-p", "the")
    info["mix"]["matrices"][name] = {"quant": "int5"}
    (broken / "ralo.json").write_text(json.dumps(info))
    assert "its precision is not known" in refused(capsys, "run", "-m", broken, "-p", "the")
