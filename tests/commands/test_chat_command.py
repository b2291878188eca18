"""`ralo chat`: scripted turns with and without a chat template, and a second turn that pays only for what is new."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import add_template, last_line, ralo
from tiny import write_hf

from ralo.cli import main
from ralo.commands.chat import ChatOptions, Conversation
from ralo.generate import Piece
from ralo.lm import LM, load
from ralo.sampling import Sampling

GREEDY = Sampling(temperature=0)
Chat = Callable[..., tuple[Any, str]]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Says lines to a model in this process; what --json gave at the end, and stderr."""

    def say(model: Path, said: str, *args: str) -> tuple[Any, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        assert main(["chat", "-m", str(model), "-n", "4", "--temperature", "0", "--json", *args]) == 0
        out, err = capsys.readouterr()
        return last_line(out), err

    return say


def test_answers_on_stdout_costs_on_stderr(chatty: Path) -> None:
    done = ralo("chat", "-m", chatty, "-n", 5, "--temperature", 0, stdin="hello\n\n/reset\nhello\n/exit\nnot said\n")
    assert done.code == 0
    answers = done.out.splitlines()
    assert len(answers) == 2 and answers[0] == answers[1] != ""  # forgotten in between: the same answer again
    assert done.err.count("[prefill ") == done.err.count("\n") == 2


def test_json_has_the_messages_and_what_each_turn_cost(chatty: Path, chat: Chat) -> None:
    values, _ = chat(chatty, "hello\nand then\n/quit\n", "--system", "be brief")
    assert [m["role"] for m in values["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert values["messages"][1]["content"] == "hello"
    assert [turn["new_tokens"] for turn in values["turns"]] == [4, 4]


def test_the_template_makes_the_prompt(chatty: Path, chat: Chat) -> None:
    values, _ = chat(chatty, "hello\n")
    prompt = "user: hello\nassistant: "
    assert values["messages"][1]["content"] == load(chatty).generate(prompt, 4, temperature=0).text


def test_a_model_without_a_template_goes_on_with_the_text(tiny: Path, chat: Chat) -> None:
    values, err = chat(tiny, "the house\nand\n")
    assert err.startswith("This model has no chat template: it goes on with your text.\n")
    lm = load(tiny)
    first = lm.generate("the house", 4, temperature=0).text
    second = lm.generate(f"the house{first}\nand", 4, temperature=0).text
    assert [m["content"] for m in values["messages"]] == ["the house", first, "and", second]


@pytest.mark.parametrize("said", ["", "\n\n", "/exit\n", "/quit", "  /exit  \nhello\n", "/reset\n"])
def test_ends_without_a_word(said: str, chatty: Path, chat: Chat) -> None:
    values, err = chat(chatty, said)
    assert values == {"messages": [], "turns": []} and err == ""


@pytest.mark.parametrize("model", ["chatty", "tiny"])
def test_second_turn_pays_only_for_what_is_new(model: str, request: pytest.FixtureRequest) -> None:
    lm = load(request.getfixturevalue(model))
    talk = Conversation(lm, ChatOptions(tokens=4), GREEDY)
    _, first = talk.answer("tell me of the house")
    history = len(talk.seq)
    answer, second = talk.answer("and")
    assert first.prompt_tokens + first.steps == history
    assert second.prompt_tokens < history < len(talk.seq)
    fresh = Conversation(lm, ChatOptions(tokens=4), GREEDY)
    fresh.messages = talk.messages[:2]
    again, whole = fresh.answer("and")
    assert again == answer and whole.prompt_tokens > second.prompt_tokens


def test_reset_forgets_all_but_the_instructions(chatty: Path) -> None:
    talk = Conversation(load(chatty), ChatOptions(system="be brief", tokens=2), GREEDY)
    talk.answer("hello")
    talk.reset()
    assert len(talk.seq) == 0 and talk.messages == [{"role": "system", "content": "be brief"}]


def test_too_long_a_conversation_is_one_line_and_the_chat_goes_on(chatty: Path, chat: Chat) -> None:
    values, err = chat(chatty, "word " * 100 + "\nhello\n")
    assert err.startswith("ralo chat: the conversation is 416 tokens, the model's context is 128: /reset it\n")
    assert [m["content"] for m in values["messages"][:1]] == ["hello"]


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("", "make no tokens of this"),
        ("{{ messages[0].nothing.at.all }}", "the model's chat template failed: "),
        ("{{ raise_exception('only\nquestions') }}", "the model's chat template failed: only questions"),
    ],
)
def test_a_template_that_fails_is_one_line_per_turn(template: str, line: str, tmp_path: Path, chat: Chat) -> None:
    model = add_template(write_hf(tmp_path, "llama", vocab_size=300), template)
    values, err = chat(model, "hello\nagain\n")
    assert err.count("\n") == err.count(line) == 2 and values["turns"] == []


def test_ctrl_c_cuts_the_answer_and_keeps_what_was_said(
    chatty: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = load(chatty).generate("user: hello\nassistant: ", 4, temperature=0).text, LM.run

    def cut(self: LM, *args: Any) -> Iterator[Piece]:
        yield next(run(self, *args))
        raise KeyboardInterrupt

    monkeypatch.setattr(LM, "run", cut)
    values, err = chat(chatty, "hello\n")
    assert err.endswith("cut short]\n") and values["turns"][0]["finish"] == "interrupted"
    assert whole.startswith(values["messages"][1]["content"])


def test_a_line_that_is_not_utf8_is_one_line_and_the_chat_goes_on(chatty: Path) -> None:
    done = ralo("chat", "-m", chatty, "-n", 2, stdin=b"f\xfcr\nhello\n", PYTHONIOENCODING="utf-8:strict")
    assert done.code == 0 and "is the input UTF-8?" in done.err and "Traceback" not in done.err
    assert done.err.count("[prefill ") == 1
