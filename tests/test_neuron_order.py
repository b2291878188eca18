"""The order of neurons: any order gives the same results, and the one by co-activation puts winners together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import KWTA, RaloError
from ralo.calibrate import calibrate
from ralo.cli import main
from ralo.loader import open_checkpoint
from ralo.model import Model
from ralo.neurons import order_of
from ralo.sequence import Sequence
from ralo.weights import build

TOKENS = np.random.default_rng(4).integers(2, 97, 40).tolist()


def groups(block: int, neurons: int, tokens: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Neurons that win in groups, scattered: bits as a profile has them, and the group of each."""
    rng = np.random.default_rng(0)
    of = rng.permutation(np.repeat(np.arange(neurons // block), block))
    won = (rng.random((tokens, neurons // block)) < 0.4)[:, of]
    noise = rng.random(won.shape) < 0.02
    return np.packbits(won ^ noise, axis=1), of


@pytest.mark.parametrize("block", [16, 32])
def test_neurons_that_win_together_come_together(block: int) -> None:
    winners, of = groups(block, 128)
    order = order_of(winners, 128, block)
    assert sorted(order.tolist()) == list(range(128))
    assert all(len(set(of[order[i : i + block]])) == 1 for i in range(0, 128, block))


def test_a_rest_that_fills_no_block() -> None:
    winners, _ = groups(16, 96)
    assert sorted(order_of(winners, 90, 32).tolist()) == list(range(90))


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2"])
def test_any_order_gives_the_same_results(tmp_path: Path, kind: str) -> None:
    ckpt = open_checkpoint(str(write_hf(tmp_path, kind)))
    cfg, plain = build(ckpt, "f32")
    orders = {i: np.random.default_rng(i).permutation(cfg.d_ff) for i in range(cfg.n_layers)}
    _, moved = build(ckpt, "f32", orders=orders)
    a, b = (Model(cfg, w).forward(TOKENS, Sequence.empty(cfg, "f32")) for w in (plain, moved))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    down = [w.layers[1].down.data.view(np.float32) for w in (plain, moved)]
    assert np.array_equal(down[0][orders[1]], down[1]), "rows of down are the same ones in another order"


def test_packed_in_that_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_hf(tmp_path / "model", "llama")
    lm = ralo.load(model, "f32")
    calibrate(lm, TOKENS, 20).save(tmp_path / "a.profile")
    flags = ["--order", str(tmp_path / "a.profile"), "--order-block", "16", "--quant", "f32"]
    assert main(["pack", "-m", str(model), "-o", str(tmp_path / "packed"), *flags]) == 0
    packed = ralo.load(tmp_path / "packed")
    plain = lm.model.forward(TOKENS, lm.new_sequence())
    np.testing.assert_allclose(packed.model.forward(TOKENS, packed.new_sequence()), plain, rtol=1e-3, atol=1e-3)
    assert not np.array_equal(packed.model.weights.layers[0].down.data, lm.model.weights.layers[0].down.data)
    blocks = ralo.load(tmp_path / "packed", modes=[KWTA(k=0.5, block="16")])
    assert np.isfinite(blocks.model.step(5, blocks.new_sequence())).all()


def test_a_profile_of_another_model(tmp_path: Path) -> None:
    small = ralo.load(write_hf(tmp_path / "small", "llama"), "f32")
    calibrate(small, TOKENS, 20).save(tmp_path / "a.profile")
    for changes in ({"intermediate_size": 128}, {"num_hidden_layers": 3}):
        other = write_hf(tmp_path / "-".join(changes), "llama", **changes)
        assert main(["pack", "-m", str(other), "-o", str(tmp_path / "no"), "--order", str(tmp_path / "a.profile")]) == 2
        assert not (tmp_path / "no").exists()
    with pytest.raises(RaloError):
        ralo.load(tmp_path / "no")
