"""Architectures that are known and need what Quire does not compute, with the reason."""

from __future__ import annotations

_STREAMS = "several residual streams (hyper-connections)"
_V4 = f"its layers attend to compressed groups of tokens and keep {_STREAMS}; DeepSeek-V3.2 is supported"
_GLM5_NEXT = (
    f"it mixes Kimi delta attention with pooled sparse attention and keeps {_STREAMS}; GLM-5 is supported"
)
REASONS = {  # by architecture and model_type
    "DeepseekV4ForCausalLM": _V4,
    "DeepseekV4Model": _V4,
    "deepseek_v4": _V4,
    "Glm5NextForConditionalGeneration": _GLM5_NEXT,
    "Glm5NextForCausalLM": _GLM5_NEXT,
    "glm5_next": _GLM5_NEXT,
    "glm5_next_text": _GLM5_NEXT,
}
