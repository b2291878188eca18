"""`ralo batch`: each prompt exactly one answer, the same however the run went: undisturbed or killed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import MANY, TOKENS, answers, started, wait_for, write
from commandline import last_line, ralo, refused

import ralo as package
from ralo.batch.answer import Answers
from ralo.batch.lines import Defaults, Questions
from ralo.batch.on_ray import QUIET
from ralo.cli import main
from ralo.prefixes import Prefixes


def test_answers_and_what_they_cost(tiny: Path, tmp_path: Path) -> None:
    asked = write(tmp_path / "in.jsonl", {"prompt": "the house"}, {"id": 5, "prompt": "on it", "max_tokens": 0})
    out = tmp_path / "out.jsonl"
    done = ralo("batch", "-m", tiny, "-i", asked, "-o", out, "-n", 8, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{out}: 2 prompts answered, 8 tokens at ") and " tok/s\n" in done.out
    values = last_line(done.out)
    assert (values["prompts"], values["answered"], values["errors"], values["tokens"]) == (2, 2, 0, 8)
    found = answers(out)
    assert set(found["1"]) == {"id", "text", "finish", "prompt_tokens", "tokens", "seed"}
    assert (found["1"]["finish"], found["1"]["tokens"], found["1"]["id"]) == ("length", 8, "1")
    assert (found["5"]["id"], found["5"]["text"], found["5"]["tokens"]) == (5, "", 0)


def test_a_line_gets_what_run_gives(chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "the house"}]
    asked = [
        {"id": "plain", "prompt": "the sea", "seed": 4},
        {"id": "chat", "messages": chat, "temperature": 0},
        {"id": "hot", "prompt": "the sea", "seed": 4, "temperature": 2, "top_k": 5, "repeat_penalty": 1.3},
    ]
    out = tmp_path / "out.jsonl"
    args = ["-m", str(chatty), "-n", "20"]
    assert main(["batch", *args, "-i", str(write(tmp_path / "in.jsonl", *asked)), "-o", str(out)]) == 0
    found = answers(out)
    wanted = {
        "plain": ["-p", "the sea", "--seed", "4"],
        "chat": ["-p", "user: the house\nassistant: ", "--temperature", "0"],
        "hot": ["-p", "the sea", "--seed", "4", "--temperature", "2", "--top-k", "5", "--repeat-penalty", "1.3"],
    }
    for name in ("plain", "hot"):
        capsys.readouterr()
        assert main(["run", *args, *wanted[name], "--json"]) == 0
        assert found[name]["text"] == last_line(capsys.readouterr().out)["text"]
        assert found[name]["seed"] == 4
    lm = package.load(chatty)
    request = lm.generate(lm.tokenizer.talk(chat), 20, temperature=0)
    assert found["chat"]["text"] == request.text and found["chat"]["prompt_tokens"] == request.stats.prompt_tokens


def test_stops_before_the_texts_given(tiny: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    text = undisturbed["q1"]["text"]
    stop, out = text[10:12], tmp_path / "out.jsonl"
    asked = {"id": "q1", "prompt": "the house 1"}
    write(tmp_path / "in.jsonl", asked, asked | {"id": "own", "seed": undisturbed["q1"]["seed"], "stop": "not in it"})
    flags = ["batch", "-m", str(tiny), "-i", str(tmp_path / "in.jsonl"), "-n", str(TOKENS), "--stop", stop]
    assert main([*flags, "-o", str(out)]) == 0
    found = answers(out)
    assert (found["q1"]["text"], found["q1"]["finish"]) == (text[: text.index(stop)], "stop")
    assert found["own"]["text"] == text


@pytest.mark.parametrize("more", [(), ("--temperature", "0"), ("--kwta-k", "0.5", "--guard", "off")], ids=str)
def test_neither_order_nor_company_changes_an_answer(more: tuple[str, ...], tiny: Path, tmp_path: Path) -> None:
    asked = [{"id": i, "prompt": "the other is in the house " * (i % 4 + 1)} for i in range(12)]
    write(tmp_path / "in.jsonl", *asked)
    write(tmp_path / "turned.jsonl", *reversed(asked))
    found = []
    for name, texts in (("in", 1), ("in", 5), ("turned", 32)):
        out = tmp_path / f"{name}.{texts}.out"
        flags = ["batch", "-m", str(tiny), "-i", str(tmp_path / f"{name}.jsonl"), "-n", "30", "--texts", str(texts)]
        assert main([*flags, "-o", str(out), *more]) == 0
        found.append(answers(out))
    assert found[0] == found[1] == found[2]
    assert len({line["seed"] for line in found[0].values()}) == 12


def test_beginnings_that_are_shared_change_no_answer(tmp_path: Path) -> None:
    """A prompt that starts like another, and one that goes on with another's answer."""
    lm = package.load("mini")
    start = "It was a dark and stormy night, and the old house stood at the end of the lane. " * 12
    first = lm.generate(start, 40, temperature=0)
    prompts = [start, start + first.text + " So", *(f"{start} Then came {name}" for name in ("John", "Jane"))]
    asked = Questions(write(tmp_path / "in.jsonl", *({"prompt": p, "temperature": 0} for p in prompts)), Defaults(20))
    found, known = [], []
    for room in (512 << 20, 0):
        with Answers(lm, 1) as made:
            made._engine.prefixes = Prefixes(room, answers=False)
            found.append({a.id: a.text for a in made.of(asked.besides(()))})
            known.append(made._engine.totals.cached_tokens)
    assert found[0] == found[1] and known[0] > 0 == known[1]


def test_another_seed_other_texts(tiny: Path, tmp_path: Path) -> None:
    asked, outs = write(tmp_path / "in.jsonl", {"prompt": "the sea"}), [tmp_path / f"{i}.out" for i in range(2)]
    for i, out in enumerate(outs):
        assert main(["batch", "-m", str(tiny), "-i", str(asked), "-n", "20", "--seed", str(i), "-o", str(out)]) == 0
    a, b = (answers(out)["1"] for out in outs)
    assert a["seed"] != b["seed"] and a["text"] != b["text"]


def test_killed_again_and_again_and_resumed(
    batch_flags: list[str], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    for lines in (1, MANY // 4, MANY // 2):
        with started(*batch_flags, "-o", out, "--texts", 2) as process:
            wait_for(process, out, lines)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        there = out.read_bytes()
        assert lines <= there.count(b"\n") < MANY
        out.write_bytes(there + b'{"id": "q3", "te')  # as a disk that was full leaves it
    done = ralo(*batch_flags, "-o", out)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{out}: {MANY} prompts answered (") and " before), " in done.out
    assert answers(out) == undisturbed
    done = ralo(*batch_flags, "-o", out, "-m", "nowhere")
    assert done == (0, f"{out}: {MANY} prompts, all answered already\n", "")
    assert answers(out) == undisturbed


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process started where Ctrl-C is ignored, as in the background of a script, would ignore it too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_says_how_to_go_on(batch_flags: list[str], undisturbed: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with started(*batch_flags, "-o", out, "--texts", 1) as process:
        wait_for(process, out, 3)
        process.send_signal(signal.SIGINT)
        told, err = process.communicate(timeout=60)
    n = out.read_bytes().count(b"\n")
    assert (process.returncode, told) == (130, b"") and 3 <= n < MANY
    assert err.decode() == f"\nralo batch: {n} of {MANY} prompts answered; the same command goes on with the others\n"
    assert all(undisturbed[name] == line for name, line in answers(out).items())


def test_two_runs_on_one_output(batch_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    with started(*batch_flags, "-o", out, "--texts", 1) as process:
        wait_for(process, out, 1)
        assert f"{out}: another ralo batch writes it: wait for its end" in refused(capsys, *batch_flags, "-o", out)


def test_what_cannot_be_answered_says_why_and_is_tried_again(tiny: Path, tmp_path: Path) -> None:
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(asked, {"prompt": "word " * 100}, {"prompt": "the sea"}, {"prompt": "more " * 100})
    flags = ("batch", "-m", tiny, "-i", asked, "-o", out, "-n", 5)
    for _ in range(2):
        done = ralo(*flags)
        why = "2 of 3 prompts could not be answered: their lines say why, the same command tries again"
        assert (done.code, done.err) == (1, f"ralo batch: {why}\n")
        found = answers(out)
        assert set(found["1"]) == {"id", "error"} and "text" in found["2"]
        assert "the prompt is 401 tokens, the model's context is 128" in found["1"]["error"]
    write(asked, {"prompt": "word"}, {"prompt": "the sea"}, {"prompt": "more"})
    assert ralo(*flags).code == 0
    assert all("text" in line for line in answers(out).values()) and len(answers(out)) == 3


def test_refuses_in_one_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, out = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"}), tmp_path / "out.jsonl"
    bad = write(tmp_path / "bad.jsonl", {"prompt": "a"}, {"prompt": "b", "top_p": 7})
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "x", "text": "", "seed": 0}\n')
    for args, line in (
        (("-o", out), "-i FILE.jsonl is missing: the prompts"),
        (("-i", good), "-o FILE.jsonl is missing: the answers"),
        (("-i", good, "-o", good), "-i and -o are the same file"),
        (("-i", "nowhere", "-o", out), "nowhere: No such file or directory"),
        (("-i", good, "-o", tmp_path / "no" / "out"), "out: No such file or directory"),
        (("-i", bad, "-o", out), f"{bad}: line 2: top_p must be a number from 0 to 1, got 7"),
        (("-i", good, "-o", other), f"{other}: line 1: answers the id 'x', which is not among the prompts"),
        (("-i", good, "-o", out, "--seed", "-1"), "--seed must be a whole number from 0"),
        (("-i", good, "-o", out, "--texts", "0"), "--texts must be a whole number from 1 to 1024"),
        (("-i", good, "-o", out, "-m", "nowhere"), "nowhere: no such model"),
        (("-i", good, "-o", out, "--ray", "here"), "--ray must be auto, local or HOST:PORT, got 'here'"),
    ):
        assert line in refused(capsys, "batch", "-m", tiny, *args)
    assert not out.exists() or out.read_bytes() == b""


def test_without_ray_it_says_what_to_install(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name, value in QUIET.items():  # so that they are gone after the test
        monkeypatch.setenv(name, value)
    asked = write(tmp_path / "in.jsonl", {"prompt": "a"})
    line = refused(capsys, "batch", "-m", tiny, "-i", asked, "-o", tmp_path / "out", "--ray", "auto")
    assert line == "ralo batch: batch --ray needs Ray: pip install 'ralo[ray]'"
