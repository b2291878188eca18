"""`ralo run`: text and its cost, prompts from anywhere, stops, seeds, Ctrl-C, and one line for what cannot be run."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import COMMAND, environment, last_line, ralo, refused

from ralo.cli import main

KEYS = {"prompt", "text", "seed", "prompt_tokens", "prefill_s", "prefill_bytes", "new_tokens", "steps", "decode_s"}
KEYS |= {"decode_bytes", "finish", "prefill_tok_s", "decode_tok_s", "bytes_per_token", "quant", "isa", "threads", "kv"}
KEYS |= {"p99_ms"}


def test_text_and_its_cost_on_stdout_and_nothing_on_stderr(tiny: Path) -> None:
    done = ralo("run", "-m", tiny, "-p", "the house", "-n", 8, "--temperature", 0, "--threads", 1)
    assert (done.code, done.err) == (0, "")
    *text, cost = done.out.splitlines()
    assert "\n".join(text).startswith("the house")
    assert cost.startswith("[prefill ") and " · decode 8 tokens at " in cost
    assert cost.endswith("dense]") and "int8 weights, f16 cache, 1 thread," in cost


def test_json_is_the_last_line_and_the_cost_goes_to_stderr(tiny: Path) -> None:
    done = ralo("run", "-m", tiny, "-p", "the house", "-n", 6, "--seed", 3, "--json")
    assert done.code == 0
    values = last_line(done.out)
    assert set(values) == KEYS
    assert values["prompt"] == "the house" and values["seed"] == 3 and values["new_tokens"] == 6
    assert values["finish"] == "length" and values["steps"] == 5 and values["decode_bytes"] > 0
    assert 0 < values["p99_ms"] <= 1e3 * values["decode_s"]
    assert done.out.startswith("the house" + values["text"])
    assert done.err.startswith("[prefill ") and done.err.count("\n") == 1


def test_same_seed_same_text_in_another_process(tiny: Path) -> None:
    seeds = (7, 7, 8)
    texts = [ralo("run", "-m", tiny, "-n", 20, "--seed", seed, "--json").out.splitlines()[:-1] for seed in seeds]
    assert texts[0] == texts[1] != texts[2]


def test_without_a_seed_the_one_in_use_is_told_and_gives_the_text_again(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for more in ((), (), None):
        seed = ("--seed", str(runs[1]["seed"])) if more is None else more
        assert main(["run", "-m", str(tiny), "-n", "12", "--json", *seed]) == 0
        runs.append(last_line(capsys.readouterr().out))
    assert runs[0]["seed"] != runs[1]["seed"]
    assert runs[1]["text"] == runs[2]["text"]


def test_prompt_from_stdin_and_from_a_file(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("über\0 the sea")
    from_file = ralo("run", "-m", tiny, "--prompt-file", path, "-n", 4, "--temperature", 0, "--json")
    from_stdin = ralo("run", "-m", tiny, "-p", "-", "-n", 4, "--temperature", 0, "--json", stdin="über the sea")
    assert last_line(from_file.out)["prompt"] == "über the sea"  # corpora put NULs between documents
    assert last_line(from_file.out)["text"] == last_line(from_stdin.out)["text"]


def test_stops_before_the_text_given(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", "-m", str(tiny), "-n", "40", "--temperature", "0", "--json"]
    main(run)
    text = last_line(capsys.readouterr().out)["text"]
    stop = text[10:12]
    main([*run, "--stop", "not in it", "--stop", stop])
    values = last_line(capsys.readouterr().out)
    assert values["finish"] == "stop" and values["text"] == text[: text.index(stop)]
    monkeypatch.setenv("RALO_STOP", stop)
    main(run)
    assert last_line(capsys.readouterr().out)["text"] == values["text"]
    main([*run, "--stop", "not in it"])
    assert last_line(capsys.readouterr().out)["text"] == text


def test_environment_sets_defaults_and_flags_win(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"MODEL": str(tiny), "QUANT": "int4", "TOKENS": "3", "KV": "int8", "JSON": "1"}.items():
        monkeypatch.setenv(f"RALO_{name}", value)
    main(["run"])
    values = last_line(capsys.readouterr().out)
    assert (values["quant"], values["new_tokens"], values["kv"]) == ("int4", 3, "int8")
    main(["run", "--quant", "int8", "-n", "2"])
    values = last_line(capsys.readouterr().out)
    assert (values["quant"], values["new_tokens"], values["kv"]) == ("int8", 2, "int8")


def test_a_prompt_on_the_command_line_wins_over_a_file_in_the_environment(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RALO_PROMPT_FILE", "/nowhere")
    assert main(["run", "-m", str(tiny), "-p", "the sea", "-n", "1"]) == 0
    assert capsys.readouterr().out.startswith("the sea")


def test_one_token_has_no_speed(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "-m", str(tiny), "-n", "1", "--temperature", "0"])
    assert "· decode 1 token · int8 weights" in capsys.readouterr().out


def test_a_full_context_stops_slides_or_is_an_error(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "-m", str(tiny), "-p", "the", "-n", "200", "--temperature", "0"]
    assert main(run) == 0
    assert "stopped: context of 128 tokens is full]" in capsys.readouterr().out
    assert main([*run, "--on-full", "slide"]) == 0
    assert "decode 200 tokens" in capsys.readouterr().out
    assert main([*run, "--on-full", "error"]) == 2
    assert "context of 128 tokens is full" in capsys.readouterr().err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process started where Ctrl-C is ignored, as in the background of a script, would ignore it too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_the_text_and_its_cost(tiny: Path) -> None:
    command = [*COMMAND, "run", "-m", str(tiny), "-p", "the house", "-n", "100000000", "--on-full", "slide"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout and process.stdout.read(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.decode(errors="replace").rstrip().endswith("cut short]")
    assert err == b""


def test_a_reader_that_leaves_is_no_error(tiny: Path) -> None:
    command = [*COMMAND, "run", "-m", str(tiny), "-n", "100000000", "--on-full", "slide"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout and process.stderr and len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert (process.wait(timeout=60), process.stderr.read()) == (0, b"")


def test_output_in_ascii_loses_letters_but_goes_on(tiny: Path) -> None:
    done = ralo("run", "-m", tiny, "-p", "für", "-n", 2, PYTHONIOENCODING="ascii")
    assert (done.code, done.err) == (0, "") and done.out.startswith("f?r")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("-m", "nowhere"), "nowhere: no such model; give 'mini', a Hugging Face directory,"),
        (("-p", ""), "the prompt is empty: give some text with -p"),
        (("-p", "\n\n"), "the prompt is empty"),
        (("-p", "word " * 100), "the prompt is 401 tokens, the model's context is 128: shorten it"),
        (("-p", "half \ud83d"), "the text is not valid Unicode"),
        (("-p", "a", "--prompt-file", "b"), "--prompt and --prompt-file are both given"),
        (("--prompt-file", "nowhere.txt"), "nowhere.txt: No such file or directory"),
        (("--prompt-file", "."), ".: Is a directory"),
        (("--quant", "int9"), "--quant must be one of auto, f32, bf16, int8, int4, got 'int9'; did you mean int8?"),
        (("--kv", "f64"), "--kv must be one of f32, f16, int8, got 'f64'"),
        (("-n", "-1"), "--tokens must be a whole number from 0 to 1073741824, got '-1'"),
        (("-n", "ten"), "--tokens must be a whole number"),
        (("--temperature", "nan"), "--temperature must be a number from 0 to 10, got 'nan'"),
        (("--top-p", "1.5"), "--top-p must be a number from 0 to 1, got '1.5'"),
        (("--on-full", "slip"), "did you mean slide?"),
        (("--threads", "1025"), "--threads must be a whole number from 0 to 1024"),
    ],
)
def test_refuses_in_one_line(args: tuple[str, ...], line: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "run", "-m", tiny, *args)
    assert message.startswith("ralo run: ") and line in message


def test_input_that_is_not_utf8(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("für".encode("latin-1"))
    assert "latin1.txt: is not UTF-8 text (byte 1)" in refused(capsys, "run", "-m", tiny, "--prompt-file", path)
    for encoding in ("utf-8", "utf-8:strict"):
        done = ralo("run", "-m", tiny, "-p", "-", stdin=b"f\xfcr", PYTHONIOENCODING=encoding)
        assert done.code == 2 and done.err.count("\n") == 1 and "is the input UTF-8?" in done.err
