"""`ralo explain`: every matrix with its bytes, and sums that agree with what the model holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import last_line, ralo, refused

from ralo.cli import main
from ralo.commands.explain import cache_bytes
from ralo.lm import load

SHAPE = "random:D=64,L=2,F=128,H=4,K=2,V=256"


def test_table_and_json(tiny: Path) -> None:
    done = ralo("explain", "-m", tiny, "--quant", "int4", "--threads", 1, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(
        f"{tiny}: arch llama, layers 2, D 64, F 96, H 4, K 2, E 16, V 300, context 128, act silu"
    )
    values = last_line(done.out)
    rows = values["rows"]
    assert [r["matrix"] for r in rows] == ["qkv", "o", "up", "down"] * 2 + ["head"]
    assert [r["storage"] for r in rows] == ["int4"] * 8 + ["int8"]  # the head decides the scores
    assert rows[0] | {"bytes": 0} == {
        "layer": "0",
        "matrix": "qkv",
        "sites": "q+k+v",
        "in": 64,
        "out": 128,
        "storage": "int4",
        "bytes": 0,
        "runs": "dense",
    }
    matrices = load(tiny, "int4").model.weights.matrices()
    assert values["weight_bytes_per_token"] == sum(r["bytes"] for r in rows)
    assert [r["bytes"] for r in rows] == [m.nbytes for m in matrices.values()]
    assert sum("dense" in line for line in done.out.splitlines()[:-1]) == len(rows)


@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_cache_bytes_are_those_of_a_sequence(kv: str) -> None:
    lm = load(SHAPE, kv=kv)
    seq = lm.new_sequence()
    seq.reserve(1)
    assert cache_bytes(lm) * seq.layers[0].capacity == seq.nbytes


LIST, TILES = "keep 0.58, 225 or a few less", "keep all, 12 whole, the others by halves"


@pytest.mark.parametrize(
    ("flags", "halves", "o"),
    [
        (["--kwta-k", "1"], False, "dense"),
        (["--kwta-k", "0.9"], True, f"kwta: {TILES}"),
        (["--kwta-k", "0.5"], True, f"kwta: {LIST}, 12 of them whole, the others by halves"),
        (["--kwta-k", "0.5", "--kwta-fine", "1"], False, f"kwta: {LIST}"),
    ],
)
def test_what_is_read_by_halves(capsys: pytest.CaptureFixture[str], flags: list[str], halves: bool, o: str) -> None:
    """Of mini, whose neurons relu shuts: its gates, and what attention gives."""
    assert main(["explain", "-m", "mini", *flags, "--json"]) == 0
    out = capsys.readouterr().out
    runs = {(row["layer"], row["matrix"]): row["runs"] for row in last_line(out)["rows"]}
    gate = f"kwta: gate first{' by halves' if halves else ''}, neurons it does not block"
    assert gate in out and o in out
    assert all(runs[str(layer), "up"] == gate and runs[str(layer), "o"] == o for layer in range(8))


def test_a_shape_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "-m", SHAPE, "--quant", "bf16"]) == 0
    out = capsys.readouterr().out
    # 2 x (64 x (3 x 64 + 64 + 2 x 128) + 128 x 64) + 64 x 256 weights of 2 bytes: k and v are padded to 64 outputs
    assert "weights read per token: 197 KB; cache per token of context: 256 B" in out


def test_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path}: is a directory without config.json" in refused(capsys, "explain", "-m", tmp_path)
    assert "unrecognized arguments: here" in refused(capsys, "explain", "here")
