"""`ralo bench`: the rows that were promised, engines in turns, and one line for what cannot be measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from commandline import last_line, ralo, refused

from ralo import bench
from ralo.bench import Samples, measure, measure_closely
from ralo.cli import main

SHAPE = "random:D=64,L=2,F=128,H=4,K=2,V=256"
QUICK = ("--rounds", "2", "-n", "3", "--prompt-tokens", "8")
KEYS = {"phase", "ctx", "quant", "threads", "isa", "tok_s", "dense_tok_s", "speedup", "ci95", "bytes_per_token", "gb_s"}
KEYS |= {"stream_gb_s", "bandwidth_share", "rss_mb", "weights_mb", "kv_mb", "rss_limit_mb", "rss_ok"}
PEER_KEYS = {"peer", "peer_quant", "peer_tok_s", "peer_tok_s_range", "vs_peer"}


@pytest.fixture(autouse=True)
def small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STREAM_WORDS", 1 << 16)  # these tests are about rows, not about speed


def test_table_and_json() -> None:
    done = ralo("bench", "-m", SHAPE, *QUICK, "--ctx", "0,16", "--quant", "bf16,int4", "--threads", 1, "--json")
    assert (done.code, done.err) == (0, "")
    rows = last_line(done.out)["rows"]
    assert [(r["quant"], r["phase"], r["ctx"], r["tokens"]) for r in rows] == [
        (quant, phase, ctx, tokens)
        for quant in ("bf16", "int4")
        for phase, ctx, tokens in (("decode", 0, 3), ("decode", 16, 3), ("prefill", 0, 8))
    ]
    for row in rows:
        assert set(row) >= KEYS and not PEER_KEYS & set(row)
        assert row["tok_s"] == row["dense_tok_s"] > 0 and row["speedup"] == 1 and row["threads"] == 1
        assert row["gb_s"] == pytest.approx(row["bytes_per_token"] * row["tok_s"] / 1e9)
        assert row["bandwidth_share"] == pytest.approx(row["gb_s"] / row["stream_gb_s"])
        assert 5 < row["rss_mb"] < row["rss_limit_mb"] and row["rss_ok"] is True
    bytes_of = {(r["quant"], r["phase"], r["ctx"]): r["bytes_per_token"] for r in rows}
    assert bytes_of["int4", "decode", 0] < bytes_of["bf16", "decode", 0] < bytes_of["bf16", "decode", 16]
    assert bytes_of["bf16", "prefill", 0] < bytes_of["bf16", "decode", 0] / 4  # the weights are read once for 8 tokens
    title, *lines = done.out.splitlines()
    assert title.startswith(f"{SHAPE}: 1 thread, ")
    assert sum(line.startswith(("  decode ", "  prefill ")) for line in lines) == 6


def test_beside_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp", reason="the peer is llama-cpp-python")
    assert main(["bench", "-m", SHAPE, *QUICK, "--peer", "llama.cpp", "--quant", "int8,int4", "--json"]) == 0
    out = capsys.readouterr().out
    rows = last_line(out)["rows"]
    assert [r["peer_quant"] for r in rows] == ["Q8_0", "Q8_0", "Q4_0", "Q4_0"]
    for row in rows:
        assert set(row) >= KEYS | PEER_KEYS and row["peer"] == "llama.cpp"
        low, high = row["vs_peer_ci95"]
        assert row["peer_tok_s"] > 0 and 0 < low <= row["vs_peer"] <= high
        assert row["peer_tok_s_range"][0] <= row["peer_tok_s"] <= row["peer_tok_s_range"][1]
    assert "ralo / peer" in out


def test_draws_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.html"
    assert main(["bench", "-m", SHAPE, *QUICK, "--ctx", "0,16", "--plot", str(path), "--json"]) == 0
    drawn = path.read_text()
    for row in last_line(capsys.readouterr().out)["rows"]:
        assert f">ralo {row['tok_s']:.1f}<" in drawn


def test_a_plot_that_cannot_be_written_is_told_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "bench", "-m", "nowhere", "--plot", "bench.svg")
    assert line == "ralo bench: --plot FILE must end in .html or .png, got 'bench.svg'"
    path = tmp_path / "no" / "bench.html"
    assert refused(capsys, "bench", "-m", "nowhere", "--plot", path) == f"ralo bench: {path}: No such file or directory"


def test_without_the_peers_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = refused(capsys, "bench", "-m", SHAPE, "--peer", "llama.cpp")
    assert "--peer llama.cpp needs the llama-cpp-python package: pip install 'ralo[peer]'" in line


def test_a_real_model_and_no_prefill(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-m", str(tiny), "--rounds", "1", "-n", "1", "--prompt-tokens", "0", "--json"]) == 0
    rows = last_line(capsys.readouterr().out)["rows"]
    assert [r["phase"] for r in rows] == ["decode"]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--ctx", "1,b"), "--ctx must be whole numbers with commas, as in 0,4096, got '1,b'"),
        (("--ctx", ""), "--ctx must be whole numbers with commas"),
        (("--ctx", "1,,2"), "--ctx must be whole numbers"),
        (("--ctx", "0,-1"), "--ctx must be whole numbers"),
        (("--ctx", "0,120"), "decode at --ctx 120 with --tokens 32 needs 154 tokens, the model's context is 128"),
        (("--prompt-tokens", "129"), "--prompt-tokens 129 is more than the model's context of 128"),
        (("--quant", "int8,int3"), "--quant must be of f32, bf16, int8, int4, with commas, got 'int3'"),
        (("--quant", "int8,"), "--quant must be of f32"),
        (("--rounds", "0"), "--rounds must be a whole number from 1 to 1000, got '0'"),
        (("--peer", "llama"), "--peer must be one of llama.cpp, got 'llama'; did you mean llama.cpp?"),
        (("-m", "random:D=64"), "random:D=64: L, F, H, K, E missing; as in random:D=2048,"),
    ],
)
def test_refuses_in_one_line(args: tuple[str, ...], line: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, "bench", "-m", tiny, *args)


class Fake:
    """An engine that notes what it is asked, and takes the seconds it is given."""

    def __init__(self, name: str, log: list[str], seconds: list[float]) -> None:
        self.name, self.log, self.seconds = name, log, iter(seconds)

    def start(self, ctx: int) -> None:
        self.log.append(f"{self.name}{ctx}")

    def prefill(self, tokens: int) -> float:
        return next(self.seconds)

    def decode(self, tokens: int) -> float:
        self.log.append(f"{self.name}+{tokens}")
        return next(self.seconds)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_engines_take_turns_and_the_first_round_does_not_count(phase: str) -> None:
    log: list[str] = []
    ticks: list[int] = []
    engines = {"a": Fake("a", log, [9, 1, 2, 4]), "b": Fake("b", log, [9, 2, 2, 2])}
    samples = measure(engines, phase, 5, 8, rounds=3, tick=lambda: ticks.append(1))
    one = ["a5", "a+8", "b5", "b+8"] if phase == "decode" else ["a5", "b5"]
    assert log == one * 4 and len(ticks) == 4
    assert samples.tok_s == {"a": [8, 4, 2], "b": [4, 4, 4]} and samples.median("a") == 4
    assert len(samples.stream_gb_s) == 3
    ratio, (low, high) = samples.ratio("a", "b")
    assert (ratio, low, high) == (1, 0.5, 2)


def test_a_close_look_takes_turns_within_a_round() -> None:
    log: list[str] = []
    engines = {"a": Fake("a", log, [9, 9, 9, 1, 2, 1]), "b": Fake("b", log, [9, 9, 9, 2, 2, 4])}
    samples = measure_closely(engines, 5, 50, rounds=1)
    assert log == ["a5", "b5", "b+16", "a+16", "a+16", "b+16", "b+16", "a+16"] * 2
    assert samples.tok_s == {"a": [12], "b": [6]}


def test_the_ratio_is_that_of_each_round() -> None:
    samples = Samples({"a": [10, 100, 1000], "b": [5, 50, 500]})  # the machine slows down for both alike
    assert samples.ratio("a", "b") == (2, (2, 2))
