"""Chat templates: the prompts that transformers makes, and templates that misbehave."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import bpe_metadata

from ralo.errors import RaloError
from ralo.tokenizer import Tokenizer, from_gguf, sandbox

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is <b>2 & 2</b>?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": 'Say "ü 🦙"'},
]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

FEATURES = """\
{%- macro show(message, width=2) -%}
  {{ message.role | upper }}: {{ message.content | trim | indent(width) }}
{%- endmacro -%}
{%- set ns = namespace(count=0, all='') -%}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% set ns.all = ns.all ~ loop.index ~ ',' %}
    {{ show(message) }}
    {{ message | tojson }} {{ {'b': [1, 2.5, none, true], 'a': '<&>'} | tojson(indent=2) }}
    {% if ns.count == 2 %}{% break %}{% endif %}
{% endfor %}
{{ ns.all }} {{ messages | length }} {{ messages | map(attribute='role') | join('-') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages[-1]['content'][:3] }}
{{ 'yes' if tools is none and documents is none and not missing is defined else 'no' }}
{{ '%s=%03d' | format('x', 7) }} {{ '{:>5}|{}'.format('a', 1) }} {{ 'ab' * 3 }} {{ 2 ** 10 }} {{ 'a,b'.split(',') }}
{{ dict(a=1).items() | list }} {{ ['b', 'a'] | sort | first }} {{ 'x' | replace('x', 'yy') }} {{ 12345678901 | tojson }}
{% generation %}{{ eos_token }}{% endgeneration %}
{% set block %}[{{ bos_token }}]{% endset %}{{ block }}{{ block }}"""


def tokenizer_with(template: str | None) -> Tokenizer:
    return from_gguf(bpe_metadata(chat_template=template), Path("tiny.gguf"))


def chat(template: str, messages: list[dict[str, str]] | None = None) -> str:
    return tokenizer_with(template).chat(MESSAGES if messages is None else messages)


def refusal(template: str, messages: list[dict[str, str]] | None = None) -> str:
    with pytest.raises(RaloError) as caught:
        chat(template, messages)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    return str(caught.value)


def test_prompt() -> None:
    expected = "<|im_start|>user\nhi<|im_end|>\n"
    tokenizer = tokenizer_with(CHATML)
    assert tokenizer.has_chat
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == expected + "<|im_start|>assistant\n"
    assert tokenizer.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("template", [CHATML, LLAMA2, FEATURES])
@pytest.mark.parametrize("generation", [True, False])
def test_prompt_is_that_of_transformers(template: str, generation: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers' own rendering")
    ours = tokenizer_with(template)
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    options = {"add_generation_prompt": generation, "tokenize": False}
    assert ours.chat(MESSAGES, generation) == theirs.apply_chat_template(MESSAGES, **options)


def test_prompt_names_the_date() -> None:
    assert chat("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))


def test_prompt_with_the_models_own_tokens() -> None:
    assert chat("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}") == "<s>|</s>|"


def test_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert "may not" in refusal("{{ messages.append(1) }}", messages)
    assert "may not" in refusal("{{ messages[0].update(role='x') }}", messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_long_conversation() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(chat(CHATML, messages)) > 2_000_000


def test_no_template() -> None:
    tokenizer = tokenizer_with(None)
    assert not tokenizer.has_chat
    with pytest.raises(RaloError, match=r"no chat template.*ralo run"):
        tokenizer.chat(MESSAGES)


def test_a_talk_with_a_template_is_its_prompt() -> None:
    """Special tokens come from the template alone: none is added before it."""
    tokenizer = tokenizer_with("{{ bos_token }}" + CHATML)
    ids = tokenizer.talk(MESSAGES)
    assert ids == tokenizer.encode(tokenizer.chat(MESSAGES), special=False)
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")


def test_a_talk_without_a_template_goes_on_as_one_text() -> None:
    tokenizer = tokenizer_with(None)
    said = [
        {"role": "user", "content": "It was night, and"},
        {"role": "assistant", "content": " the house slept."},
        {"role": "user", "content": "Then"},
    ]
    assert tokenizer.talk(said) == tokenizer.encode("It was night, and the house slept.\nThen")
    assert tokenizer.talk(said[:1]) == tokenizer.encode("It was night, and")  # goes on where it ends
    assert tokenizer.decode(tokenizer.talk(MESSAGES)).count("\n") == 2  # one of the user's own, one after the answer


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_talk_goes_on_from_its_own_beginning(template: str | None) -> None:
    """What was said so far stays as it is: a server does not run it again."""
    tokenizer = tokenizer_with(template)
    first = tokenizer.talk([{"role": "user", "content": "one two"}])
    answer = {"role": "assistant", "content": "three"}
    second = tokenizer.talk([{"role": "user", "content": "one two"}, answer, {"role": "user", "content": "four"}])
    assert tokenizer.decode(second).startswith(tokenizer.decode(first)) and second[: len(first)] == first


def test_templates_know_developers_as_the_system() -> None:
    tokenizer = tokenizer_with(CHATML)
    developer, system, user = ([{"role": role, "content": "be brief"}] for role in ("developer", "system", "user"))
    assert tokenizer.talk(developer) == tokenizer.talk(system) != tokenizer.talk(user)


def test_a_talk_that_a_template_refuses() -> None:
    with pytest.raises(RaloError, match="chat template failed: Conversation roles must alternate"):
        tokenizer_with(LLAMA2).talk([{"role": "assistant", "content": "me first"}])


def test_the_templates_own_complaint() -> None:
    message = refusal(LLAMA2, [{"role": "assistant", "content": "me first"}])
    assert message == (
        "the model's chat template failed: Conversation roles must alternate user/assistant/user/assistant/..."
    )


def test_messages_of_the_wrong_kind() -> None:
    messages: Any = ["hi"]
    assert "role" in refusal(CHATML, messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ unknown() }}",
        "{{ messages[99].content }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('two\nlines') }}",
        "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
        "x" * 300_000,
    ],
    ids=range(9),
)
def test_broken_templates(template: str) -> None:
    assert "chat template" in refusal(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages['__class__'] }}{{ messages.__class__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ ('{0.__class__}' | safe).format(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ self.__dict__ }}",
        "{{ lipsum() }}",
    ],
)
def test_no_way_out_of_the_sandbox(template: str) -> None:
    assert "chat template failed" in refusal(template)


LOOP = "{% for i in range(100000) %}"
GROW = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(100) %}{% set ns.x"


@pytest.mark.parametrize(
    "template",
    [
        f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
        f"{LOOP}{LOOP}{{{{ 'x' }}}}{{% endfor %}}{{% endfor %}}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(100000) if range(100000) | list | length == 1 %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% for i in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
        LOOP + "y" * 1000 + "{% endfor %}",
        "{% set text %}" + LOOP + "y" * 10_000 + "{% endfor %}{% endset %}",
        GROW + " = ns.x ~ ns.x %}{% endfor %}",
        GROW + " = ns.x + ns.x %}{% endfor %}",
        GROW + " = [ns.x, ns.x] | join %}{% endfor %}",
        GROW + " = ns.x.replace('a', ns.x) %}{% endfor %}",
        GROW + " %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for i in range(100) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(100) %}{% set ns.x = ns.x * 9 %}{% endfor %}",
        "{{ 10 ** 9 * 'a' }}",
        "{{ 9 ** 99999999 }}",
        "{{ 'a'.ljust(10 ** 11) }}",
        "{{ 'a' | center(10 ** 11) }}",
        "{{ 'a' | indent(10 ** 11, true) }}",
        "{{ ['a'] | batch(10 ** 10, 'x') | list }}",
        "{{ range(100000) | map('string') | join('a' * 100000) }}",
        "{{ range(100000) | list | tojson(indent=1000000) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%*d' % (99999999999, 1) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=99999999999) }}",
        "{{ strftime_now('%99999999999d') }}",
    ],
    ids=range(30),
)
def test_work_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    start = time.monotonic()
    assert "chat template failed" in refusal(template)
    assert time.monotonic() - start < 5
