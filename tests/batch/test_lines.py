"""Questions are checked line by line, answers are kept whole, and nothing that is not ours is touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ralo.batch import lines
from ralo.batch.lines import Answer, Defaults, Known, Questions, SeededSampling, seed_of
from ralo.batch.output import Output
from ralo.errors import RaloError

DEFAULTS = Defaults(64, ("###",), SeededSampling(temperature=0.5, seed=3))


def questions(folder: Path, *asked: Any) -> Questions:
    path = folder / "in.jsonl"
    path.write_bytes(b"".join(a if isinstance(a, bytes) else json.dumps(a).encode() + b"\n" for a in asked))
    return Questions(path, DEFAULTS)


def test_a_line_says_what_differs_from_the_flags(tmp_path: Path) -> None:
    chat = [{"role": "developer", "content": "be short"}, {"role": "user", "content": "hi"}]
    own = {"max_tokens": 5, "temperature": 0, "top_p": 1, "top_k": 3, "min_p": 0.1, "seed": 9, "stop": ["a", "b"]}
    penalties = {"presence_penalty": 1, "frequency_penalty": 0.5, "repeat_penalty": 1.5}
    asked = questions(tmp_path, {"prompt": "a"}, b"\n  \r\n", {"id": 7, "messages": chat, **own, **penalties})
    plain, rich = asked.besides(())
    assert (plain.id, plain.prompt, plain.messages, plain.max_tokens, plain.stop) == ("1", "a", (), 64, ("###",))
    assert plain.sampling == SeededSampling(temperature=0.5, seed=seed_of(3, "1"))
    assert (rich.id, rich.key, rich.max_tokens, rich.stop) == (7, "7", 5, ("a", "b"))
    assert [m["role"] for m in rich.messages] == ["developer", "user"]
    assert rich.sampling == SeededSampling(0, 3, 1, 0.1, 1.5, 1, 0.5, 9)
    assert asked.known == {"1": Known(1, seed_of(3, "1")), "7": Known(4, 9)}
    assert [q.key for q in asked.besides({"1"})] == ["7"]


def test_null_asks_for_nothing(tmp_path: Path) -> None:
    [question] = questions(tmp_path, {"id": None, "prompt": "a", "messages": None, "stop": None}).besides(())
    assert (question.id, question.stop) == ("1", ("###",))


def test_seeds_are_the_same_for_ever() -> None:
    """An output that was begun long ago must go on as it began."""
    assert seed_of(0, "1") == 4311062187307671 and seed_of(1, "1") == 7113962720343422
    assert len({seed_of(s, str(i)) for s in range(30) for i in range(30)}) == 900


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "is not JSON: Expecting property name"),
        (b"[1]", "must be a JSON object, got [1]"),
        (b'"prompt"', "must be a JSON object"),
        (b'{"prompt": "\xff"}', "is not UTF-8 (byte 12)"),
        (b'{"prompt": "a"} {"prompt": "b"}', "is not JSON: Extra data"),
        (b'{"prompt": "a", "top_p": NaN}', "is not JSON: NaN is no number"),
        (b"[" * 100_000, "has too many brackets in brackets"),
        (b'{"prompt": "a", "id": ' + b"9" * 5000 + b"}", "is not JSON"),
        ({}, 'needs either "prompt" or "messages"'),
        ({"prompt": "a", "messages": []}, 'needs either "prompt" or "messages", not both'),
        ({"prompt": ""}, 'prompt must be a text that is not empty, got ""'),
        ({"prompt": ["a"]}, 'prompt must be a text that is not empty, got ["a"]'),
        ({"prompt": "half \ud83d"}, "prompt is not valid Unicode: it has half of a surrogate pair"),
        ({"prompt": "a", "max_token": 3}, "unknown key 'max_token'; did you mean max_tokens? (keys: id, prompt, "),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens must be a whole number from 0 to 1073741824, got -1"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be a whole number"),
        ({"prompt": "a", "temperature": "hot"}, 'temperature must be a number from 0 to 10, got "hot"'),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature must be a number from 0 to 10, got Infinity"),
        ({"prompt": "a", "top_k": -2}, "top_k must be a whole number from 0"),
        ({"prompt": "a", "seed": -1}, "seed must be a whole number from 0"),
        ({"prompt": "a", "stop": ""}, "stop must be a text that is not empty"),
        ({"prompt": "a", "stop": [1]}, "stop must be a text that is not empty, got 1"),
        ({"prompt": "a", "id": ""}, "id must be a text of at most 256 characters or a number"),
        ({"prompt": "a", "id": "x" * 257}, "id must be a text of at most 256 characters"),
        ({"prompt": "a", "id": True}, "id must be a text"),
        ({"prompt": "a", "id": [1]}, "id must be a text"),
        (b'{"prompt": "a", "id": 1e999}', "id must be a text"),
        ({"messages": []}, "messages must be a list of messages, got []"),
        ({"messages": "hi"}, 'messages must be a list of messages, got "hi"'),
        ({"messages": ["hi"]}, 'a message must have "role" and "content" alone, got "hi"'),
        ({"messages": [{"role": "user"}]}, 'a message must have "role" and "content" alone'),
        ({"messages": [{"role": "bot", "content": "a"}]}, "a message's role must be one of system, developer, user,"),
        ({"messages": [{"role": [], "content": "a"}]}, "a message's role must be one of system, developer, user,"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content must be a text"),
        ({"prompt": "a", "id": "first"}, 'the id "first" is that of line 1 too'),
        ({"prompt": "a", "id": "2"}, 'the id "2" is that of line 2 too'),
    ],
)
def test_the_first_bad_line_is_named(line: Any, why: str, tmp_path: Path) -> None:
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    with pytest.raises(RaloError) as caught:
        questions(tmp_path, {"prompt": "a", "id": "first"}, {"prompt": "b", "id": 2}, b"\n", line + b"\n", b"worse")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/in.jsonl: line 4: ") and why in message and len(message) < 400


def test_lines_and_files_have_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RaloError, match=r"in\.jsonl: has no prompts in it"):
        questions(tmp_path, b"\n \n")
    monkeypatch.setattr(lines, "MOST_BYTES", 1 << 20)
    assert questions(tmp_path, {"prompt": "a" * 1_000_000}).known
    with pytest.raises(RaloError, match="line 2: is longer than 1 MB"):
        questions(tmp_path, {"prompt": "a"}, {"prompt": "a" * 1_100_000})
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe"):
        with pytest.raises(RaloError, match="is no ordinary file"):
            Questions(tmp_path / name, DEFAULTS)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    asked = questions(tmp_path, {"prompt": "a"})
    with asked.path.open("a") as file:
        file.write('{"prompt": "b"}\n')
    with pytest.raises(RaloError, match="line 2: was not there before"):
        list(asked.besides(()))


KNOWN = {"a": Known(1, 5), "7": Known(2, 6), "c": Known(3, 7)}
WHOLE = Answer("a", 5, "text\n\u2028ü", "length", 3, 4)


def test_answers_are_lines_and_are_not_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Output(path, KNOWN) as output:
        output.write(WHOLE)
        output.write(Answer(7, 6, error="too long"))
        assert output.answered == {"a"}
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [
        {"id": "a", "text": "text\n\u2028ü", "finish": "length", "prompt_tokens": 3, "tokens": 4, "seed": 5},
        {"id": 7, "error": "too long"},
    ]


@pytest.mark.parametrize("torn", range(1, len(WHOLE.line())))
def test_a_line_that_was_not_finished_is_cut_off(torn: int, tmp_path: Path) -> None:
    path, seven = tmp_path / "out.jsonl", Answer(7, 6, "x", "eos", 1, 1)
    path.write_bytes(seven.line() + WHOLE.line()[:torn])
    with Output(path, KNOWN) as output:
        assert output.answered == {"7"} and path.read_bytes() == seven.line()
        output.write(WHOLE)
    assert path.read_bytes() == seven.line() + WHOLE.line()


def test_lines_with_an_error_are_taken_out_and_nothing_else(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "out.jsonl"
    real.write_bytes(Answer("c", 7, error="no").line() + WHOLE.line() + Answer(7, 6, error="no").line() + b'{"id"')
    real.chmod(0o640)
    link.symlink_to(real)
    with Output(link, KNOWN) as output:
        assert output.answered == {"a"} and real.read_bytes() == WHOLE.line()
        with pytest.raises(RaloError, match="another ralo batch writes it"):
            Output(link, KNOWN)
        output.write(Answer("c", 7, "y"))
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o640 and real.read_bytes().count(b"\n") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "real.jsonl"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"dear diary", "line 1: is no answer of ralo batch; give -o another file"),
        (b"dear diary\n", "line 1: is no answer of ralo batch; give -o another file"),
        (WHOLE.line() + b"\n", "line 2: is no answer"),
        (WHOLE.line() + b'{"id": 7, "text": 3}\n', "line 2: is no answer"),
        (WHOLE.line() + b"{}", "line 2: is no answer"),
        (Answer("b", 5, "x").line(), "line 1: answers the id 'b', which is not among the prompts"),
        (WHOLE.line() * 2, "line 2: answers the id 'a' once more"),
        (Answer("a", 6, "x").line(), "line 1: was made with another seed than id 'a' has now"),
    ],
)
def test_what_is_not_ours_is_refused_and_not_touched(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    for _ in range(2):  # a refusal gives the lock back
        with pytest.raises(RaloError) as caught:
            Output(path, KNOWN)
        assert str(caught.value).startswith(f"{path}: {why}") and path.read_bytes() == content


def test_places_that_cannot_be_gone_on_with_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(RaloError, match="is no ordinary file"):
            Output(path, KNOWN)
    with pytest.raises(FileNotFoundError):
        Output(tmp_path / "no" / "out.jsonl", KNOWN)
