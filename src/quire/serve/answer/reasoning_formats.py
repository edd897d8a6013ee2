"""The formats in which models write their reasoning. They are chosen by name, or by the chat template."""

from __future__ import annotations

from quire.serve.answer.harmony import HARMONY
from quire.serve.answer.reasoning import ReasoningMarks

THINK = ReasoningMarks("<think>", "</think>")
REASONING_FORMATS = {
    "gpt_oss": HARMONY,
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>"),
    "minimax_m3": ReasoningMarks("<mm:think>", "</mm:think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "gemma": ReasoningMarks("<|channel>thought", "<channel|>"),
    "cohere": ReasoningMarks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        content_begin="<|START_RESPONSE|>",
        content_end="<|END_RESPONSE|>",
    ),
    "kimi": ReasoningMarks("◁think▷", "◁/think▷"),
    "granite": ReasoningMarks(
        "Here is my thought process:",
        "Here is my response:",
        begins=("Here's my thought process:",),
        ends=("Here's my response:",),
    ),
    "think_response": ReasoningMarks(  # Granite 3.3
        "<think>", "</think>", content_begin="<response>", content_end="</response>", optional_content=True
    ),
    "apriel": ReasoningMarks(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
    ),
    "deepseek_r1": ReasoningMarks("<think>", "</think>", always=True),
    "think": THINK,
}
REASONING_PARSERS: dict[str, ReasoningMarks | None] = {**REASONING_FORMATS, "none": None}
_ALIASES = {
    "openai_gptoss": "gpt_oss",
    "gpt-oss": "gpt_oss",
    "gemma4": "gemma",
    "cohere_command3": "cohere",
    "granite3": "granite",
    "granite33": "think_response",
    "deepseek-r1": "deepseek_r1",
    "seed-oss": "seed_oss",
    "": "none",
    **dict.fromkeys(
        ("qwen3", "qwq", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "glm", "glm45", "glm47", "kimi_k2",
         "minimax_m2", "nemotron", "nemotron_v3", "step3", "step3p5", "olmo3", "hermes", "smollm3", "lfm2", "ernie45",
         "mimo", "hunyuan_v1", "holo2", "interns1", "exaone4", "poolside"),
        "think",
    ),
}  # fmt: skip


def known_reasoning_parser(name: str) -> bool:
    return name == "auto" or name in REASONING_PARSERS or name in _ALIASES


def choose_reasoning(name: str, template: str) -> ReasoningMarks | None:
    """Return the marks of a reasoning parser, or None for no parser.

    The name `auto` chooses by the marks in the chat template.
    """
    return REASONING_PARSERS[reasoning_name(name, template)]


def reasoning_name(name: str, template: str) -> str:
    """Return the name of the reasoning parser that `name`, which may be `auto` or an alias, stands for."""
    if name != "auto":
        return _ALIASES.get(name, name)
    if HARMONY.begin in template:
        return "gpt_oss"
    for candidate in ("seed_oss", "minimax_m3", "mistral", "gemma", "cohere", "kimi", "granite", "apriel"):
        if REASONING_FORMATS[candidate].begin in template:
            return candidate
    if THINK.end not in template:
        return "none"
    if "<response></response>" in template:
        return "think_response"
    return "think" if THINK.begin in template else "deepseek_r1"
