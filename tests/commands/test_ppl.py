"""`ralo ppl`: the number that the library gives, under the names that were promised, and one line for a wrong text."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import last_line, ralo, refused
from tiny import write_hf

from ralo import KWTA, peer
from ralo.cli import main
from ralo.lm import load

KEYS = {"ppl", "dense_ppl", "delta_ppl_pct", "ci95", "kl", "top1_agree", "tokens"}
RUN_AS = {"model", "quant", "kv", "ctx", "first"}


def test_table_and_json(tiny: Path, text: Path) -> None:
    done = ralo("ppl", "-m", tiny, "--text", text, "--ctx", 32, "--tokens", 100, "--json")
    assert (done.code, done.err) == (0, "")
    values = last_line(done.out)
    assert set(values) == KEYS | RUN_AS
    assert (values["tokens"], values["ctx"], values["quant"]) == (100, 32, "int8")
    expected = load(tiny).perplexity(text.read_text(), ctx=32, tokens=100).ppl
    assert values["ppl"] == pytest.approx(expected) and f"{expected:.4f}" in done.out
    dense = ("dense_ppl", "delta_ppl_pct", "ci95", "kl", "top1_agree")  # no mode is on: what ran was dense
    assert [values[key] for key in dense] == [values["ppl"], 0, [0, 0], 0, 1]
    header = next(line for line in done.out.splitlines() if "ppl" in line)
    assert header.split()[:6] == ["model", "quant", "kv", "ctx", "tokens", "ppl"]


def test_without_a_window_it_is_the_models_context(tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ppl", "-m", str(tiny), "--text", str(text), "--json"]) == 0
    values = last_line(capsys.readouterr().out)
    assert values["ctx"] == 128 and values["tokens"] == len(load(tiny).encode(text.read_text())) - 1


def test_the_window_and_the_precision_count(tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for args in (["--ctx", "8"], ["--ctx", "64"], ["--ctx", "64", "--quant", "int4"], ["--ctx", "64", "--kv", "int8"]):
        main(["ppl", "-m", str(tiny), "--text", str(text), "--json", *args])
        found.append(last_line(capsys.readouterr().out)["ppl"])
    assert len(set(found)) == len(found)


def test_late_positions_only(tiny: Path, text: Path) -> None:
    flags = ("--ctx", 64, "--tokens", 128, "--first", 48, "--kwta", "on", "--kwta-k", 0.3, "--json")
    done = ralo("ppl", "-m", tiny, "--text", text, *flags)
    assert (done.code, done.err) == (0, "")
    values = last_line(done.out)
    assert (values["tokens"], values["first"]) == (32, 48) and values["kl"] > 0
    header = next(line for line in done.out.splitlines() if "ppl" in line)
    assert header.split()[3:7] == ["ctx", "first", "tokens", "ppl"]
    expected = load(tiny, modes=[KWTA(k=0.3)]).perplexity(text.read_text(), ctx=64, tokens=128, first=48)
    assert values["ppl"] == pytest.approx(expected.ppl)


def test_beside_the_peer(tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp", reason="the peer is llama-cpp-python")
    flags = ["--ctx", "32", "--tokens", "100", "--quant", "bf16", "--peer", "llama.cpp", "--json"]
    assert main(["ppl", "-m", str(tiny), "--text", str(text), *flags]) == 0
    out = capsys.readouterr().out
    values = last_line(out)
    assert set(values) == KEYS | RUN_AS | {
        "peer",
        "peer_quant",
        "peer_ppl",
        "peer_delta_pct",
    }
    assert (values["peer"], values["peer_quant"]) == ("llama.cpp", "BF16")
    assert values["peer_ppl"] == pytest.approx(values["ppl"], rel=0.01) and values["peer_ppl"] != values["ppl"]
    assert values["peer_delta_pct"] == pytest.approx(100 * (values["ppl"] / values["peer_ppl"] - 1))
    assert f"BF16 {values['peer_ppl']:.4f}" in out


@pytest.mark.parametrize(
    ("model_type", "options", "line"),
    [
        ("llama", {"hidden_act": "relu"}, "its Llama is always silu, this model is relu: it would predict otherwise"),
        ("mistral", {}, "--peer llama.cpp is for Llama models; this is 'mistral'"),
    ],
)
def test_what_the_peer_refuses_is_said_before_anything_is_measured(
    model_type: str,
    options: dict[str, str],
    line: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(peer, "check", lambda: None)
    monkeypatch.setattr("ralo.commands.ppl.perplexity", lambda *_: pytest.fail("measured for nothing"))
    model = write_hf(tmp_path / "model", model_type, vocab_size=300, **options)
    assert line in refused(capsys, "ppl", "-m", model, "--text", text, "--peer", "llama.cpp")


def test_missing_text_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--text FILE is missing" in refused(capsys, "ppl", "-m", "nowhere")
    assert "nowhere.txt: No such file" in refused(capsys, "ppl", "-m", "nowhere", "--text", "nowhere.txt")


@pytest.mark.parametrize(
    ("content", "args", "line"),
    [
        (b"", (), "the text is too short: perplexity needs at least two tokens"),
        (b"a", (), "too short"),
        (b"\0\0\0", (), "too short"),
        (b"abc \xff", (), "text: is not UTF-8 text (byte 4)"),
        (b"abcdef", ("--tokens", "6"), "text: has 6 tokens, --tokens 6 needs 7"),
        (b"abcdef", ("--ctx", "129"), "--ctx 129 must be from 1 to the model's context of 128"),
        (b"abcdef", ("--ctx", "-1"), "--ctx must be a whole number from 0 to"),
        (b"abcdef", ("--ctx", "1,2"), "--ctx must be a whole number"),
        (b"abcdef", ("--ctx", "4", "--first", "4"), "--first 4 must be from 0 to 3, within a window of --ctx 4"),
        (b"abcdef", ("--first", "5"), "the text is too short: --first 5 needs at least 7 tokens, it has 6"),
        (b"abcdef", ("--first", "-1"), "--first must be a whole number from 0 to"),
        (b"abcdef", ("--tokens", "many"), "--tokens must be a whole number"),
    ],
)
def test_refuses_in_one_line(
    content: bytes, args: tuple[str, ...], line: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(content)
    assert line in refused(capsys, "ppl", "-m", tiny, "--text", tmp_path / "text", *args)


def test_a_directory_is_no_text(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "ppl", "-m", tiny, "--text", tmp_path) == f"ralo ppl: {tmp_path}: Is a directory"
