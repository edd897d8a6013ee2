"""Chat templates: the 33 published ones render as in transformers; each gets messages in a form that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.frontend.templates.chat import check_messages, render_chat
from quire.frontend.templates.renderer import TemplateRenderer
from quire.frontend.templates.traits import TemplateTraits
from quire.frontend.tokenizer.tokenizer import NoTokenizer
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
    """A tokenizer that has only a template and special tokens."""

    def __init__(self, template: str | None, **named: str) -> None:
        super().__init__()
        self.special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        self.chat_templates = ({"default": template} if template is not None else {}) | named


RENDERER = TemplateRenderer()  # its processes end with this one


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render_chat(RENDERER, TemplateOnly(source), messages, **options)


def outcome(call: Any) -> str | type:
    """Return the rendered text, or a mark for an error: both implementations must refuse the same conversations."""
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
    for given in (PLAIN, SYSTEM, CALLS):
        messages = check_messages(given, RENDERER.traits(source), knows_developer=True)
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
                rendered += isinstance(mine, str) and given is not CALLS
    assert rendered >= 2, "the template must render a plain conversation"
    # One of them only supports requests with tools.
    assert any(
        "who are you?" in str(outcome(lambda t=t: ours(source, PLAIN, tools=t, template_kwargs=extra)))
        for t in (None, TOOLS)
    )


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem if p else "absent")
def test_calls_without_content_are_calls_with_an_empty_one(path: Path | None) -> None:
    """OpenAI's client sends null content back with tool calls. Nine of the templates write None for it, or fail."""
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


def called(content: Any, arguments: Any) -> list[dict[str, Any]]:
    """Build a conversation in which the model calls a tool, in the form that clients send back."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "find_sky", "arguments": arguments}}
    said = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "blue-42"}
    answer = {"role": "assistant", "content": "It is blue."}
    return [PLAIN[0], said, result, answer, {"role": "user", "content": "And tomorrow?"}]


def counts(text: str) -> dict[str, int]:
    return {word: text.count(word) for word in ("find_sky", "town", "Bergen", "blue-42")}


ONCE = {"find_sky": 1, "town": 1, "Bergen": 1, "blue-42": 1}
REFUSED_BY_THE_SANDBOX = ("Kimi-K2-Thinking",)  # it appends to a list; transformers refuses that too


NAMES_RESULTS = ("openai-gpt-oss-120b", "upstage-Solar-Open-100B")  # with the name of the function


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem if p else "absent")
def test_a_call_and_its_result_appear_exactly_once(path: Path | None) -> None:
    """Given another form, nine of the published templates drop tool calls, print None, or fail."""
    if path is None:
        pytest.skip("shared/data/chat_templates is absent")
    source = path.read_text(encoding="utf-8")
    if "tool_calls" not in source or path.stem in REFUSED_BY_THE_SANDBOX:
        pytest.skip("the template prints no calls")
    options: dict[str, Any] = {"tools": TOOLS}
    if "firefunction" in path.stem:
        options["template_kwargs"] = {"functions": "[]", "datetime": "noon"}
    arguments = ({"town": "Bergen"}, '{"town": "Bergen"}')
    texts = {ours(source, called(content, a), **options) for content in (None, "", []) for a in arguments}
    assert len(texts) == 1, "one text, in whatever form the client sends the call"
    for text in (*texts, ours(source, called("Let me look.", arguments[1]), **options)):
        found = counts(text)
        found["town"] = min(found["town"], 1)  # XML names it at both ends
        if path.stem in NAMES_RESULTS:
            found["find_sky"] -= 1
        assert found == ONCE
        assert "None" not in text and '\\"town' not in text and "'town'" not in text


CALL = "{% for c in m.tool_calls %}({{ c.function.name }} "
OWN_TEMPLATES = {
    "object": CALL + "{{ c.function.arguments | tojson }}){% endfor %}",
    "items": CALL + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}){% endfor %}",
    "concatenates a string": CALL + "{{ '<' + c.function.arguments + '>' }}){% endfor %}",
    "prints a string": CALL + "{{ c.function.arguments }}){% endfor %}",
    "null content": "{% if m.content is none %}"
    + CALL
    + "{{ c.function.arguments }}){% endfor %}{% endif %}",
    "absent content": "{% if m.content is not defined %}"
    + CALL
    + "{{ c.function.arguments }}){% endfor %}{% endif %}",
    "concatenates content": "{{ '' + m.content }}"
    + CALL
    + "{{ c.function.arguments | tojson }}){% endfor %}",
    "prints None": "{{ m.content }}" + CALL + "{{ c.function.arguments | tojson }}){% endfor %}",
}


@pytest.mark.parametrize("name", OWN_TEMPLATES)
@pytest.mark.parametrize("content", [None, "", "Let me look."])
def test_calls_come_in_the_form_that_a_template_reads(name: str, content: str | None) -> None:
    source = "{% for m in messages %}{% if m.tool_calls %}" + OWN_TEMPLATES[name]
    source += "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    for arguments in ({"town": "Bergen"}, '{"town": "Bergen"}'):
        text = ours(source, called(content, arguments))
        assert counts(text) == ONCE
        assert "None" not in text and "\\" not in text and "'" not in text
        if name in ("null content", "absent content", "concatenates content", "prints None"):
            assert text.count("Let me look.") == (content == "Let me look.")


def test_the_callers_messages_are_not_changed() -> None:
    messages = called("", '{"town": [1, 2]}')
    found = check_messages(messages, TemplateTraits())
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"town": [1, 2]}
    assert messages == called("", '{"town": [1, 2]}')


STRING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
PARTS = "{% for m in messages %}{% for c in m['content'] %}({{ c.text }}){% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.get('content') %}({{ c.text }}){% endfor %}{% endif %}{% endfor %}"
)
FIRST = "{% for m in messages %}<{{ m.content[0].text }}>{% endfor %}"
# Ollama's Gemma 3 reads only parts, although it tests elsewhere whether content is a string.
MIXED = "{% if x is string %}{{ x }}{% endif %}" + PARTS


@pytest.mark.parametrize(
    ("source", "of_parts", "of_text"),
    [
        (STRING, "[user]a\nb>", "[user]ab>"),
        (PARTS, "(a)(b)", "(ab)"),
        (BOTH, "(a)(b)", "ab"),
        (FIRST, "<a\nb>", "<ab>"),
        (MIXED, "(a)(b)", "(ab)"),
    ],
)
def test_content_comes_in_the_form_that_a_template_reads(source: str, of_parts: str, of_text: str) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ours(source, parts) == of_parts
    assert ours(source, [{"role": "user", "content": "ab"}]) == of_text


def test_roles_may_read_content_differently() -> None:
    """The template reads parts in user messages and strings in all others."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for c in m.content %}({{ c.text }}){% endfor %}"
    )
    source += "{% else %}[{{ m.content | trim }}]{% endif %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}]
    messages = [{"role": role, "content": content} for role in ("system", "user") for content in ("a", parts)]
    assert ours(source, messages) == "[a][a](a)(a)"


def test_unknown_roles_go_to_the_template() -> None:
    assert ours(STRING, [{"role": "critic", "content": "x"}]) == "[critic]x>"
    strict = "{% for m in messages %}{{ raise_exception('no ' + m.role) if m.role != 'user' }}{% endfor %}"
    with pytest.raises(RequestError, match="no critic"):
        ours(strict, [{"role": "critic", "content": "x"}])


def test_developer_messages_are_system_messages_unless_the_template_knows_better() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert ours(STRING, messages) == "[system]x>"
    assert ours(STRING + "{# developer #}", messages) == "[developer]x>"


# ------------------------------------------------------------------------- continue_final_message

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PREFILLS = ["<", "e", "|", "im_end", "The answer is", " x", '"quoted"', "a\nb", "assistant", "👋"]


def continued(source: str, text: Any, **options: Any) -> str:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    return ours(source, messages, add_generation_prompt=False, continue_final_message=True, **options)


@pytest.mark.parametrize("text", PREFILLS)
def test_continue_final_message_ends_behind_the_last_message(text: str) -> None:
    begin = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert continued(TURNS, text) == begin + text
    assert continued(TURNS, text + " \n") == begin + text + " \n"
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": text}]
    assert continued(TURNS, parts) == begin + "first\n" + text
    for trimmed in (
        TURNS.replace("m.content", "m.content | trim"),
        TURNS.replace("m.content", "m.content.rstrip()"),
    ):
        stripped = text.strip() if "trim" in trimmed else text
        assert continued(trimmed, text + " \n") == begin + stripped
    in_parts = TURNS.replace("{{ m.content }}", "{% for c in m.content %}{{ c.text }}|{% endfor %}")
    assert continued(in_parts, parts).endswith("first|" + text)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem if p else "absent")
def test_continued_messages_begin_what_published_templates_render(path: Path | None) -> None:
    if path is None:
        pytest.skip("shared/data/chat_templates is absent")
    source = path.read_text(encoding="utf-8")
    extra = {"functions": "[]", "datetime": "noon"} if "firefunction" in path.stem else {}
    for text in PREFILLS:
        messages = [PLAIN[0], {"role": "assistant", "content": text}]
        options: dict[str, Any] = {"add_generation_prompt": False, "template_kwargs": extra, "tools": TOOLS}
        whole = ours(source, messages, **options)
        begun = ours(source, messages, **options, continue_final_message=True)
        assert whole.startswith(begun)
        assert begun.endswith(text.strip())


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        ours(STRING, PLAIN, continue_final_message=True)
    with pytest.raises(RequestError, match="text the chat template keeps"):
        continued("{{ messages[0].content }}", "x")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(RequestError, match="needs a last message with text"):
        ours(STRING, called("", {})[:2], **options)


def test_named_templates_and_variables() -> None:
    tokenizer = TemplateOnly("plain {{ bos_token }}{{ x }}", tool_use="tools {{ tools | length }}")
    assert render_chat(RENDERER, tokenizer, PLAIN, template_kwargs={"x": "é"}) == "plain <s>é"
    assert render_chat(RENDERER, tokenizer, PLAIN, tools=TOOLS) == "tools 1"
    with pytest.raises(RequestError, match="messages"):
        render_chat(RENDERER, tokenizer, PLAIN, template_kwargs={"messages": []})


def test_generation_blocks_and_loop_controls_are_read() -> None:
    source = "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ours(source, PLAIN) == "Hi, who are you?"
    assert ours("{{ {'b': 1, 'a': '<é>'} | tojson(indent=1) }}", PLAIN) == '{\n "b": 1,\n "a": "<é>"\n}'


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(RENDERER, TemplateOnly(None), PLAIN)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ("hello", "list of at least one"),
        ([5], r"messages\[0\]"),
        ([{"role": 5, "content": "x"}], r"messages\[0\].role"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role"),
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
