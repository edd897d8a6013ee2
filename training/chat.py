"""The chat format: the text of messages, and the loss weight of each part of it.

`render` writes exactly the text of `CHAT_TEMPLATE` (a test compares them), split into segments with a loss weight each.
Text that the model must produce has full weight; stories and questions that it only reads have a low weight.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]
Segment = tuple[str, float]

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
READ_WEIGHT = 0.15  # text that comes from the user, a tool or a bare story
WRITE_WEIGHT = 1.0

TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

CHAT_TEMPLATE = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}\n"
    "{%- if tools %}\n"
    "    {{- '<|im_start|>system\\n' }}\n"
    "    {%- if system %}{{- system + '\\n\\n' }}{%- endif %}\n"
    "    {{- " + json.dumps(TOOLS_HEAD) + " }}\n"
    "    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}\n"
    "    {{- " + json.dumps(TOOLS_TAIL) + " }}\n"
    "    {{- '<|im_end|>\\n' }}\n"
    "{%- elif system %}\n"
    "    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- elif message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\\n' }}\n"
    "        {%- if message.content %}{{- message.content }}{%- endif %}\n"
    "        {%- for call in message.tool_calls or [] %}\n"
    "            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}\n"
    "            {%- set call = call.function or call %}\n"
    '            {{- \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}\n'
    "            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}\n"
    "            {{- '}\\n</tool_call>' }}\n"
    "        {%- endfor %}\n"
    "        {{- '<|im_end|>\\n' }}\n"
    "    {%- elif message.role == 'tool' %}\n"
    "        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}\n"
    "        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\n"
    "        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{dump({'name': name, 'arguments': arguments})}\n</tool_call>"


def render(
    messages: list[Message], tools: list[dict[str, Any]] | None = None, prompt: bool = False
) -> list[Segment]:
    """Return the segments of a conversation; with `prompt` they end where the assistant's answer begins."""
    read, segments = [], []
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if tools:
        parts = [system, "\n\n"] if system else []
        parts += [TOOLS_HEAD, *("\n" + dump(tool) for tool in tools), TOOLS_TAIL]
        read.append(f"{TURN_START}system\n{''.join(parts)}{TURN_END}\n")
    elif system:
        read.append(f"{TURN_START}system\n{system}{TURN_END}\n")
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "user":
            read.append(f"{TURN_START}user\n{content}{TURN_END}\n")
        elif role == "assistant":
            read.append(f"{TURN_START}assistant\n")
            segments.append(("".join(read), READ_WEIGHT))
            calls = [
                call_text(c["function"]["name"], c["function"]["arguments"])
                for c in message.get("tool_calls", [])
            ]
            text = "\n".join([content, *calls] if content else calls)
            segments.append((text + TURN_END, message.get("weight", WRITE_WEIGHT)))
            read = ["\n"]
        elif role == "tool":
            head = "" if messages[i - 1]["role"] == "tool" else f"{TURN_START}user"
            last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            read.append(
                f"{head}\n<tool_response>\n{content}\n</tool_response>" + (f"{TURN_END}\n" if last else "")
            )
    if prompt:
        read.append(f"{TURN_START}assistant\n")
    if read:
        segments.append(("".join(read), READ_WEIGHT))
    return segments


def text_of(segments: list[Segment]) -> str:
    return "".join(text for text, _ in segments)
