"""Chat templates: the 33 published ones render as in transformers, and hostile ones end in a clean error."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from quire.frontend import sandbox
from quire.frontend.chat import check_messages, content_format, render_chat
from quire.frontend.sandbox import compile_template
from quire.frontend.tokenizer import NoTokenizer
from quire.types import RequestError

FOLDER = Path(__file__).parents[2] / ".." / "shared" / "data" / "chat_templates" / "templates"
TEMPLATES = sorted(FOLDER.glob("*.jinja")) or [None]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a place <now> & later, naïve",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "city"}},
                "required": ["place"],
            },
        },
    }
]
PLAIN = [
    {"role": "user", "content": "Hi, who are you?"},
    {"role": "assistant", "content": "A helper."},
    {"role": "user", "content": "  Tell me <more> “now” \n"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *PLAIN]
CALLS = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "weather", "arguments": {"place": "Köln"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"sky": "blue"}'},
    {"role": "user", "content": "And tomorrow?"},
]


class TemplateOnly(NoTokenizer):
    """A tokenizer of which only the template and the names of special tokens are asked."""

    def __init__(self, template: str | None, **named: str) -> None:
        super().__init__()
        self.special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        self.chat_templates = ({"default": template} if template is not None else {}) | named


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render_chat(TemplateOnly(source), messages, **options)


def outcome(call: Any) -> str | type:
    """The text, or that there was an error: what a template refuses, both must refuse."""
    try:
        return call()
    except Exception:
        return Exception


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem if p else "absent")
def test_published_templates_render_as_in_transformers(path: Path | None) -> None:
    if path is None:
        pytest.skip("shared/data/chat_templates is absent")
    helper = pytest.importorskip("transformers.utils.chat_template_utils")
    source = path.read_text(encoding="utf-8")
    extra = {"functions": "[]", "datetime": "noon"} if "firefunction" in path.stem else {}  # it needs both
    rendered = 0
    for messages in (PLAIN, SYSTEM, CALLS):
        for tools in (None, TOOLS):
            for prompt in (True, False):
                theirs = outcome(
                    lambda m=messages, t=tools, p=prompt: helper.render_jinja_template(
                        [m],
                        tools=t,
                        chat_template=source,
                        add_generation_prompt=p,
                        bos_token="<s>",
                        eos_token="</s>",
                        **extra,
                    )[0][0]
                )
                options = {"tools": tools, "add_generation_prompt": prompt, "template_kwargs": extra}
                mine = outcome(lambda m=messages, o=options: ours(source, m, **o))
                assert mine == theirs
                rendered += isinstance(mine, str) and messages is not CALLS
    assert rendered >= 2, "the template must render a plain conversation"
    # One of them is made for tools alone.
    assert any(
        "who are you?" in str(outcome(lambda t=t: ours(source, PLAIN, tools=t, template_kwargs=extra)))
        for t in (None, TOOLS)
    )


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem if p else "absent")
def test_calls_without_content_are_calls_with_an_empty_one(path: Path | None) -> None:
    """As OpenAI's client sends its own answers back. Nine of the templates write None, or fail at it."""
    if path is None:
        pytest.skip("shared/data/chat_templates is absent")
    source = path.read_text(encoding="utf-8")
    empty = outcome(lambda: ours(source, CALLS, tools=TOOLS))
    for message in ({**CALLS[1], "content": None}, {k: v for k, v in CALLS[1].items() if k != "content"}):
        assert outcome(lambda m=message: ours(source, [CALLS[0], m, *CALLS[2:]], tools=TOOLS)) == empty


def test_all_templates_are_there() -> None:
    if TEMPLATES == [None]:
        pytest.skip("shared/data/chat_templates is absent")
    assert len(TEMPLATES) == 33


def test_arguments_of_tool_calls_may_be_a_json_string() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2]}'}}
    found = check_messages([{"role": "assistant", "tool_calls": [call]}], "string")
    assert found[0]["tool_calls"][0]["function"]["arguments"] == {"a": [1, 2]}
    assert found[0]["content"] == ""
    assert call["function"]["arguments"] == '{"a": [1, 2]}', "the caller's message is not changed"


STRING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
PARTS = "{% for m in messages %}{% for c in m['content'] %}({{ c.text }}){% endfor %}{% endfor %}"


def test_content_parts_are_joined_or_passed_as_the_template_reads_them() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert content_format(STRING) == "string" and content_format(PARTS) == "parts"
    both = "{% for m in messages %}{% if m.content is string %}" + "{{ m.content }}{% else %}"
    both += "{% for c in m.get('content') %}({{ c.text }}){% endfor %}{% endif %}{% endfor %}"
    assert content_format(both) == "openai"
    assert ours(both, parts) == "(a)(b)" and ours(both, [{"role": "user", "content": "ab"}]) == "ab"
    assert ours(PARTS, [{"role": "user", "content": "ab"}]) == "(ab)"
    assert ours(STRING, parts) == "[user]a\nb>"
    assert ours(PARTS, parts) == "(a)(b)"


def test_continue_final_message_ends_inside_the_last_message() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is "}]
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</end>{% endfor %}"
    text = ours(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>x</end><assistant>The answer is "
    trimmed = source.replace("m.content", "m.content | trim")
    assert ours(trimmed, messages, add_generation_prompt=False, continue_final_message=True).endswith(
        "answer is"
    )
    with pytest.raises(RequestError, match="exclude each other"):
        ours(source, messages, continue_final_message=True)


def test_named_templates_and_variables() -> None:
    tokenizer = TemplateOnly("plain {{ bos_token }}{{ x }}", tool_use="tools {{ tools | length }}")
    assert render_chat(tokenizer, PLAIN, template_kwargs={"x": "é"}) == "plain <s>é"
    assert render_chat(tokenizer, PLAIN, tools=TOOLS) == "tools 1"
    with pytest.raises(RequestError, match="messages"):
        render_chat(tokenizer, PLAIN, template_kwargs={"messages": []})


def test_generation_blocks_and_loop_controls_are_read() -> None:
    source = "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ours(source, PLAIN) == "Hi, who are you?"
    assert ours("{{ {'b': 1, 'a': '<é>'} | tojson(indent=1) }}", PLAIN) == '{\n "b": 1,\n "a": "<é>"\n}'


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(TemplateOnly(None), PLAIN)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ("hello", "list of at least one"),
        ([5], r"messages\[0\]"),
        ([{"role": "king", "content": "x"}], r"messages\[0\].role"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must be a string"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "valid JSON",
        ),
        ([{"role": "assistant", "tool_calls": ["x"]}], "function with a name"),
        ([{"role": "user", "content": "x", "extra": object()}], "JSON values"),
    ],
)
def test_wrong_messages_are_named(messages: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        ours(STRING, messages)


HOSTILE = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.os.system('x') }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ raise_exception('x') }}",
    "{{ messages.append(1) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = b %}{% endfor %}{% endfor %}",
    "{% for a in range(99999999) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% macro f(d) %}{% if d %}{{ f(d - 1) }}{{ f(d - 1) }}{% endif %}{% endmacro %}{{ f(300) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 99999999999 }}",
    "{{ 9 ** 999999999 }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '%99999999999d' | format(1) }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 99999999999) }}",
    "{{ 'a'.ljust(99999999999) }}",
    "{{ 'a' | center(99999999999) }}",
    "{{ 'a\na' | indent(99999999999) }}",
    "{{ lipsum(n=100000) }}",
    "{{ ('a' * 1000000) | replace('a', 'a' * 1000000) }}",
    "{{ ('a' * 1000000).replace('a', 'a' * 1000000) }}",
    "{{ ('a' * 1000000) | list | join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "{{ (['a' * 1000000] * 90000) | join }}",
    "{{ ''.join(['a' * 1000000] * 90000) }}",
    "{{ [1] | batch(999999999, 'x') | list }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{{ '%.99999999999f' % 1 }}",
    "{{ '%*d' % (99999999999, 1) }}",
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "{% for x in [[1, 1]] recursive %}{% set y = [1, 1] %}{{ loop(y) }}{{ loop(y) }}{% endfor %}",
    "{% set n = range(99999) | list %}{% for a in n if a in n and 0 %}{% endfor %}{% for a in n %}{% for b in n if -1 in n %}{% endfor %}{% endfor %}",
    "{% set n = range(99999) | list %}{% for a in n %}{{ n | select('none') | list }}{% endfor %}",
    "{% for a in messages %}{% for b in 'x' * 9999999 %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ m.content + 5 }}{% endfor %}",
    "{{ nothing.at.all }}",
    "{{ 1 / 0 }}",
    "{% for m in messages %}",
    "{% include 'x' %}",
    "{{ x | nosuchfilter }}",
    "{" * 5000,
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
]


@pytest.mark.parametrize("source", HOSTILE, ids=lambda s: s[:50])
def test_hostile_and_broken_templates_end_in_a_clean_error(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.5)
    began = time.thread_time()  # what others take of the processor does not count
    if source.startswith("{{{"):
        outcome(lambda: ours(source, PLAIN))
    else:
        with pytest.raises(RequestError, match="chat template"):
            ours(source, PLAIN)
    assert time.thread_time() - began < 5


def test_the_limits_leave_ordinary_work_alone() -> None:
    source = "{{ '**%s** 100%% *' % 'x' }}{{ '{:>5}'.format(1) }}{{ 'a-b' | replace('-', '+') }}{{ [1, 2] | join(', ') }}"
    assert ours(source, PLAIN) == "**x** 100% *    1a+b1, 2"
    long = [{"role": "user", "content": "word " * 200_000}] * 3
    assert (
        len(ours("{% for m in messages %}{{ m.content | trim | replace('w', 'W') }}\n{% endfor %}", long))
        > 2_900_000
    )


def test_a_refusal_carries_the_templates_own_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ours("{{ raise_exception('roles must alternate') }}", PLAIN)


def test_output_is_bounded() -> None:
    source = "{% set x = 'a' * 1000000 %}{% for i in range(90000) %}{{ x }}{% endfor %}"
    with pytest.raises(RequestError, match="stopped"):
        ours(source, PLAIN)


def test_compiled_templates_are_kept() -> None:
    assert compile_template(STRING) is compile_template(STRING)
