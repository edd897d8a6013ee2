"""Write docs/MODELS.md, the table of model families, from their files in src/quire/models/families/.

    python tools/write_models.py

`tests/unit/test_model_families.py` checks that the page is up to date.
"""

from __future__ import annotations

from pathlib import Path

from quire.models.config.hf import PARSERS
from quire.models.families import Family, catalogue

PAGE = Path(__file__).resolve().parents[1] / "docs" / "MODELS.md"
HEAD = """# Models

This page lists the model families that Quire runs, what is special about each, and the formats that `auto` usually
finds in their chat templates. It is generated: `python tools/write_models.py` writes it from `models/families/`.

A checkpoint names its architecture in `config.json`. An architecture that is not in the list is refused, with the
nearest supported ones or with the reason; `quire doctor` prints the list. Checkpoints of multimodal models load their text part if its
`model_type` is supported, and requests with images are refused. A new family is one file
([guide](contributing/model-family.md)).

Every family can draft with `ngram`, `suffix` or a `draft` model ([SPECULATION](SPECULATION.md)); the column "draft heads"
has the further methods.

| models | architecture | what is special | GGUF | tools | reasoning | draft heads |
|---|---|---|---|---|---|---|
"""
# Families whose parsers are in models/config/.
OTHERS = (
    Family(
        title="DeepSeek-V2, V2-Lite",
        architectures=("DeepseekV2ForCausalLM",),
        parse=PARSERS["DeepseekV2ForCausalLM"],
        special="latent attention, experts in groups, shared experts, first layers dense",
        gguf=("deepseek2",),
        tools="deepseek_v3",
    ),
    Family(
        title="DeepSeek-V3, R1, Kimi-K2, text of Kimi-K2.5",
        heads=("eagle", "eagle3", "mtp"),
        architectures=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
        parse=PARSERS["DeepseekV3ForCausalLM"],
        special="the same, sigmoid routing with a correction bias",
        gguf=("deepseek2",),
        tools="deepseek_v3",
        reasoning="think",
    ),
    Family(
        title="Mixtral",
        architectures=("MixtralForCausalLM",),
        parse=PARSERS["MixtralForCausalLM"],
        special="experts",
        tools="mistral",
    ),
    Family(
        title="Qwen 3 MoE, text of Qwen 3-VL MoE",
        architectures=("Qwen3MoeForCausalLM",),
        parse=PARSERS["Qwen3MoeForCausalLM"],
        special="experts, norms of q and k heads",
        gguf=("qwen3moe", "qwen3vlmoe"),
        tools="hermes",
        reasoning="think",
    ),
)
NOTES = """
- **Phi-3 with longrope:** `max_model_len` above the original context uses the factors for long contexts for every
  request. Serve at most `original_max_position_embeddings` tokens to use the factors for short ones.
- **Granite:** the residual stream is kept divided by `residual_multiplier`, which norms do not notice.
- **Gemma 3n and 4:** layers that read the keys and values of an earlier layer keep none, so they take no memory of the
  KV cache. Layers of two head sizes do not share the parts of a block.
- **Sparse attention** (DeepSeek-V3.2, GLM-5): steps whose rows have at most `index_topk` tokens attend to all of them.
  Index keys are kept in the dtype of the KV cache.
- **Not supported:** DeepSeek-V4 and GLM-5-Next, which need compressed attention and several residual streams.
- **Layers with other operations on q and k** (OLMo 2 and 3, Command R+, Hunyuan, Ministral 3, Llama 4) run them in plain
  PyTorch, so on a CPU their small steps are not captured.
"""


def page() -> str:
    """Return the contents of the page."""
    families = sorted((*catalogue(), *OTHERS), key=lambda family: family.title.lower())
    return HEAD + "".join(_row(family) for family in families) + NOTES


def _row(family: Family) -> str:
    gguf = ", ".join(f"`{name}`" for name in family.gguf) or "-"
    tools, reasoning = (
        name if name in ("json", "none") else f"`{name}`" for name in (family.tools, family.reasoning)
    )
    heads = ", ".join(f"`{name}`" for name in family.heads) or "-"
    cells = (family.title, family.architectures[0], family.special, gguf, tools, reasoning, heads)
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
