"""Settings of speculative decoding, and vLLM's form of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.speculation.vocabulary import check_vocabulary
from quire.types import ConfigError


def test_a_speculative_config_sets_the_settings() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    config = EngineConfig(speculative_config=given)
    assert (config.spec_method, config.spec_tokens, config.speculative_config) == ("ngram", 3, None)
    config = EngineConfig(speculative_config={"method": "draft_model", "model": "demo-draft"})
    assert (config.spec_method, config.spec_model) == ("draft", "demo-draft")
    quantised = EngineConfig(
        speculative_config={"method": "draft_model", "model": "demo-draft", "quantization": "fp8"}
    )
    assert quantised.spec_quantization == "fp8"
    assert config.resolved(0, 512).spec_tokens == 5 and EngineConfig().resolved(0, 512).spec_tokens is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_config": {}}, "speculative_config needs a method: ngram, suffix, draft, eagle, eagle3, mtp"),
        ({"speculative_config": {"method": "ngram", "tokens": 3}}, "has no field 'tokens'; its fields are method"),
        ({"speculative_config": {"method": "medusa"}}, "spec_method must be one of off, ngram, suffix, draft, eagle, eagle3, mtp, got 'medusa'"),
        ({"speculative_config": {"method": "eagle"}}, "spec_method eagle needs a spec_model; add --spec-model"),
        ({"speculative_config": {"method": "ngram"}, "spec_method": "ngram"}, "say the same thing; give one"),
        ({"spec_method": "ngram", "spec_tokens": 17}, "spec_tokens must be at most 16, got 17"),
        ({"spec_tokens": 3}, "spec_tokens needs a spec_method"),
        ({"spec_method": "draft"}, "spec_method draft needs a spec_model; add --spec-model"),
        ({"spec_method": "eagle3"}, "spec_method eagle3 needs a spec_model"),
        ({"spec_method": "mtp", "spec_model": "x"}, "spec_model x needs a spec_method that uses it, got mtp"),
        ({"spec_model": "demo-draft"}, "spec_model demo-draft needs a spec_method that uses it, got off; add --spec-method draft, or eagle or eagle3"),
        ({"spec_method": "ngram", "spec_quantization": "fp8"}, "spec_quantization fp8 converts a spec_model, but there is none"),
        ({"spec_method": "ngram", "kv_layout": "none"}, "spec_method ngram needs a KV cache"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def tokenizer(folder: Path, vocab: dict[str, int], added: dict[str, int]) -> Path:
    folder.mkdir()
    content = [{"content": token, "id": number} for token, number in added.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": content}))
    return folder


def test_vocabularies_are_compared_by_token(tmp_path: Path) -> None:
    one = tokenizer(tmp_path / "one", {"a": 0, "b": 1}, {"<end>": 2})
    same = tokenizer(tmp_path / "same", {"b": 1, "a": 0}, {"<end>": 2})
    other = tokenizer(tmp_path / "other", {"a": 0, "b": 1}, {"<end>": 3})
    check_vocabulary(one, 3, same, 128)
    with pytest.raises(ConfigError, match="token '<end>' is 3 there and 2 here"):
        check_vocabulary(one, 3, other, 4)
    with pytest.raises(ConfigError, match="a vocabulary of 4 tokens, but the model has 3"):
        check_vocabulary(one, 3, tmp_path, 4)
    check_vocabulary(tmp_path, 4, one, 4)
