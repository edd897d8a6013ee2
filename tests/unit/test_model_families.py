"""The catalogue of model families: its page, its names, public configs, and refusals of unknown architectures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.models.config.gguf import ARCHITECTURES
from quire.models.config.gguf_families import TRANSLATIONS
from quire.models.config.hf import parsers
from quire.models.families import catalogue
from quire.models.heads.base import has_plain_layers
from quire.models.registry import CLASSES
from quire.models.spec import ModelSpec
from quire.serve.answer.reasoning_formats import REASONING_PARSERS
from quire.serve.answer.tools.formats import TOOL_PARSERS
from quire.types import ModelError

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    """If this fails, run `python tools/write_models.py`."""
    source = importlib.util.spec_from_file_location("write_models", ROOT / "tools" / "write_models.py")
    assert source and source.loader
    module = importlib.util.module_from_spec(source)
    sys.modules[source.name] = module
    source.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page()
    shown = {name for family in (*catalogue(), *module.OTHERS) for name in family.architectures}
    assert {name for name in parsers() if name.endswith("ForCausalLM")} <= shown, "list them in OTHERS"


def test_draft_heads_are_offered_where_models_can_show_their_states() -> None:
    others = {name for name, model in CLASSES.items() if not has_plain_layers(model)}
    assert others == {
        family.parse.__module__.rpartition(".")[2] for family in catalogue() if not family.heads
    }


def test_names_are_unique_and_known() -> None:
    names = [name for family in catalogue() for name in family.architectures]
    assert len(names) == len(set(names))
    for family in catalogue():
        assert family.tools in TOOL_PARSERS and family.reasoning in REASONING_PARSERS
    in_hf = {
        "qwen3moe",
        "qwen3vlmoe",
        "deepseek2",
    }  # parsed in models/config/hf.py, outside of the catalogue
    shared = {"olmo2", "deepseek2"}  # one architecture of files for several families
    ggufs = [name for family in catalogue() for name in family.gguf]
    assert {name for name in ggufs if ggufs.count(name) > 1} <= shared
    assert {*TRANSLATIONS, *ARCHITECTURES} - in_hf == set(ggufs) - in_hf
    assert not set(TRANSLATIONS) & set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Llama5ForCausalLM", "LlamaForCausalLM"),
        ("Olmo4ForCausalLM", "Olmo3ForCausalLM"),
        ("Gemma9ForCausalLM", "Gemma3ForCausalLM"),
    ],
)
def test_an_unknown_architecture_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=rf"{name} is not supported; the nearest supported are .*{nearest}"):
        ModelSpec.from_config({"architectures": [name], "model_type": "unknown"})
    with pytest.raises(ModelError, match="no supported one has a similar name; `quire doctor` lists all"):
        ModelSpec.from_config({"architectures": ["Zyx"]})


@pytest.mark.parametrize("name", ["DeepseekV4ForCausalLM", "Glm5NextForConditionalGeneration"])
def test_an_architecture_that_needs_another_design_says_so(name: str) -> None:
    with pytest.raises(ModelError, match=rf"{name} is not supported: .*hyper-connections.* is supported"):
        ModelSpec.from_config({"architectures": [name], "text_config": {"model_type": "glm5_next_text"}})


# What public configs say that decides the size: model: architecture, hidden, intermediate, layers, heads, K/V heads,
# head size, vocabulary, tied, and the parameters in millions that the model's card or its tensors state.
PUBLIC = """
gemma-2b: GemmaForCausalLM 2048 16384 18 8 1 256 256000 1 2506
gemma-2-9b: Gemma2ForCausalLM 3584 14336 42 16 8 256 256000 1 9242
Phi-3-mini-4k: Phi3ForCausalLM 3072 8192 32 32 32 96 32064 0 3821
Phi-4: Phi3ForCausalLM 5120 17920 40 40 10 128 100352 0 14660
Phi-4-mini: Phi3ForCausalLM 3072 8192 32 24 8 128 200064 1 3836
OLMo-2-1124-7B: Olmo2ForCausalLM 4096 11008 32 32 32 128 100352 0 7299
Olmo-3-7B: Olmo3ForCausalLM 4096 11008 32 32 32 128 100278 0 7298
GLM-4-9B-0414: Glm4ForCausalLM 4096 13696 40 32 2 128 151552 0 9400
granite-3.3-8b: GraniteForCausalLM 4096 12800 40 32 8 128 49159 1 8171
SmolLM3-3B: SmolLM3ForCausalLM 2048 11008 36 16 4 128 128256 1 3075
Seed-OSS-36B: SeedOssForCausalLM 5120 27648 64 80 8 128 155136 0 36151
EXAONE-4.0-32B: Exaone4ForCausalLM 5120 27392 64 40 8 128 102400 0 32003
Hunyuan-7B: HunYuanDenseV1ForCausalLM 4096 14336 32 32 8 128 128256 1 7505
ERNIE-4.5-0.3B: Ernie4_5ForCausalLM 1024 3072 18 16 2 128 103424 1 361
starcoder2-3b: Starcoder2ForCausalLM 3072 12288 30 24 2 128 49152 1 3030
c4ai-command-r-v01: CohereForCausalLM 8192 22528 40 64 64 128 256000 1 34981
c4ai-command-r7b-12-2024: Cohere2ForCausalLM 4096 14336 32 32 8 128 256000 1 8028
Apertus-8B: ApertusForCausalLM 4096 21504 32 32 8 128 131072 0 8053
AFM-4.5B: ArceeForCausalLM 2560 18432 36 20 4 128 128004 0 4619
Minitron-4B: NemotronForCausalLM 3072 9216 32 24 8 128 256000 0 4190
Ministral-8B: MinistralForCausalLM 4096 12288 36 32 8 128 131072 0 8020
stablelm-2-1_6b: StableLmForCausalLM 2048 5632 24 32 32 64 100352 0 1645
phi-2: PhiForCausalLM 2560 10240 32 32 32 80 51200 0 2780
"""


@pytest.mark.parametrize("line", PUBLIC.strip().splitlines(), ids=lambda line: line.split(":")[0])
def test_public_configs_have_the_right_size(line: str) -> None:
    name, *numbers, millions = line.split(": ")[1].split()
    keys = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    config: dict[str, Any] = {"architectures": [name], "max_position_embeddings": 4096}
    spec = ModelSpec.from_config({**config, **dict(zip(keys, map(int, numbers), strict=True))})
    assert spec.num_parameters / 1e6 == pytest.approx(int(millions), rel=0.004)
    assert spec.dtype and spec.rope and len(spec.layer_ropes) == spec.num_layers
