"""Tokenizers reproduce published reference ids, agree across file formats, and refuse corrupt files."""

from __future__ import annotations

import json
import random
import shutil
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire.files.gguf_header import read_gguf_metadata
from quire.frontend.generation_config import load_generation_defaults
from quire.frontend.tokenizer import backends
from quire.frontend.tokenizer.gguf_tokenizer import SPLITS, gguf_backend
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from quire.types import ModelError, RequestError

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
STORIES = DATA / "models" / "stories260K"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is absent")

_loaded: dict[str, Tokenizer] = {}


def real(name: str) -> Tokenizer:
    """Return a tokenizer of shared/data. It is cached, because loading 128k tokens takes a second."""
    if name not in _loaded:
        _loaded[name] = load_tokenizer(DATA / name)
    return _loaded[name]


def reference(vocab: str) -> list[tuple[str, list[int]]]:
    with (DATA / "tokenizers" / f"ggml-vocab-{vocab}.gguf.inp").open(encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = (DATA / "tokenizers" / f"ggml-vocab-{vocab}.gguf.out").read_text().split("\n")
    lines += [""] * (len(texts) - len(lines))
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines)]


def random_text(rng: random.Random) -> str:
    kinds = [
        "ab cde THE",
        "  \n\t",
        "éüñß",
        "日本語テキスト",
        "😀👩‍👩‍👧🇩🇪",
        "<>/s|",
        "0123456789",
        "'s're.,!?",
        "\u0301\u200d\ufeff",
    ]
    return "".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(40)))


@needs_data
@pytest.mark.parametrize(("name", "vocab"), [("llama-3.1", "llama-bpe"), ("qwen3", "qwen2")])
def test_reference_ids(name: str, vocab: str) -> None:
    tokenizer = real(f"tokenizers/{name}")
    cases = reference(vocab)
    assert len(cases) == 47
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


@needs_data
@pytest.mark.parametrize("name", ["tokenizers/llama-3.1", "tokenizers/qwen3", "models/stories260K"])
def test_decoding_is_that_of_the_tokenizers_library(name: str) -> None:
    from tokenizers import Tokenizer as Reference

    ours, theirs = real(name), Reference.from_file(str(DATA / name / "tokenizer.json"))
    rng = random.Random(1)
    whole_characters = "stories" in name  # bytes that are no UTF-8 read differently there, one U+FFFD each
    for _ in range(300):
        ids = (
            ours.encode(random_text(rng))
            if whole_characters
            else [rng.randrange(ours.vocab_size + 50) for _ in range(rng.randrange(20))]
        )
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@needs_data
def test_begin_of_sequence_follows_the_files() -> None:
    llama, qwen, stories = real("tokenizers/llama-3.1"), real("tokenizers/qwen3"), real("models/stories260K")
    assert llama.encode("Hi") == [128000, *llama.encode("Hi", add_special_tokens=False)]
    assert qwen.encode("Hi") == qwen.encode("Hi", add_special_tokens=False)
    assert stories.encode("") == [1] and stories.encode("", add_special_tokens=False) == []
    assert (llama.bos_id, qwen.bos_id, stories.bos_id) == (128000, None, 1)
    assert (llama.eos_ids, qwen.eos_ids, stories.eos_ids) == ([128009], [151645], [2])
    assert llama.is_special(128009) and not llama.is_special(5)
    assert (llama.vocab_size, qwen.vocab_size, stories.vocab_size) == (128256, 151669, 512)


@needs_data
def test_rendered_chat_has_one_begin_of_sequence() -> None:
    from quire.frontend.templates.chat import render_chat
    from quire.frontend.templates.renderer import TemplateRenderer

    llama = real("tokenizers/llama-3.1")
    renderer = TemplateRenderer()
    text = render_chat(renderer, llama, [{"role": "user", "content": "Hi"}])
    renderer.close()
    ids = llama.encode(text, add_special_tokens=False)
    assert ids.count(128000) == 1 and ids[0] == 128000


@needs_data
@pytest.mark.parametrize(("flag", "expected"), [(True, 1), (False, 0), (None, 1)])
def test_add_bos_token_overrules_the_post_processor(tmp_path: Path, flag: bool | None, expected: int) -> None:
    shutil.copy(STORIES / "tokenizer.json", tmp_path)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": flag}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("a").count(1) == expected
    document = json.loads((STORIES / "tokenizer.json").read_text())
    document["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert load_tokenizer(tmp_path).encode("a").count(1) == (1 if flag else 0)


@needs_data
def test_three_formats_of_one_vocabulary_agree(tmp_path: Path) -> None:
    folder, gguf = real("models/stories260K"), real("models/stories260K/stories260K-F32.gguf")
    model = load_tokenizer(STORIES / "tokenizer.model")
    rng = random.Random(7)
    texts = [random_text(rng) for _ in range(1500)] + ["<s>hi</s> yo<unk>x", "a<s>b", " ", "", "\x00\n\r"]
    for text in texts:
        ids = folder.encode(text)
        assert model.encode(text) == ids and gguf.encode(text) == ids
        for skip in (True, False):
            assert folder.decode(ids, skip) == model.decode(ids, skip) == gguf.decode(ids, skip)
        if "<" not in text:
            assert folder.decode(ids) == text
    for other in (model, gguf):
        assert (other.vocab_size, other.bos_id, other.eos_ids) == (512, 1, [2])
        assert other.special_ids == folder.special_ids
        assert all(other.token_bytes(i) == folder.token_bytes(i) for i in range(3, 512))


@needs_data
def test_sentencepiece_folder_with_added_tokens_and_without_legacy_prefix(tmp_path: Path) -> None:
    shutil.copy(STORIES / "tokenizer.model", tmp_path)
    config: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "legacy": False,
        "added_tokens_decoder": {
            "1": {"content": "<s>", "special": True},
            "512": {"content": "<|turn|>", "special": True},
            "513": {"content": "<call>", "special": False},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    bare = load_tokenizer(STORIES).encode("hi", add_special_tokens=False)
    ids = tokenizer.encode("<|turn|>hi<call>")
    assert ids[:2] == [1, 512] and ids[-1] == 513
    assert ids[2:-1] != bare, "no leading space after a special token"
    assert tokenizer.decode(ids) == "hi<call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|turn|>hi<call>"
    assert tokenizer.vocab_size == 514 and tokenizer.is_special(512) and not tokenizer.is_special(513)


@needs_data
def test_special_tokens_are_found_wherever_a_search_window_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(STORIES / "tokenizer.model", tmp_path)
    pieces = {"512": "<|turn|>", "513": "<|turn|><x>", "514": "<|t"}
    config = {"added_tokens_decoder": {id_: {"content": piece} for id_, piece in pieces.items()}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    rng = random.Random(3)
    texts = ["".join(rng.choices(["a", " ", *pieces.values(), "<x>", "<s>"], k=30)) for _ in range(100)]
    whole = [tokenizer.encode(text) for text in texts]
    for window in (1, 2, 5, 9):
        monkeypatch.setattr(backends, "_WINDOW_CHARS", window)
        assert [tokenizer.encode(text) for text in texts] == whole


@needs_data
@pytest.mark.parametrize(
    "name", ["tokenizers/llama-3.1", "tokenizers/qwen3", "models/stories260K/tokenizer.model"]
)
def test_long_texts_leave_the_interpreter_to_other_threads(name: str) -> None:
    """Encoding must release the GIL, because the event loop runs in another thread."""
    tokenizer, ids = real(name), []
    thread = threading.Thread(target=lambda: ids.extend(tokenizer.encode("hello <s> 123 " * 20_000)))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20, "a library that keeps the interpreter's lock leaves room for one or two"
    assert len(ids) > 20_000


@needs_data
def test_short_and_long_texts_are_tokenized_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    texts = [random_text(rng) for _ in range(200)]
    for name in ("tokenizers/llama-3.1", "tokenizers/qwen3", "models/stories260K"):
        before = [real(name).encode(text) for text in texts]
        monkeypatch.setattr(backends, "_SHORT_CHARS", -1)
        assert [real(name).encode(text) for text in texts] == before
        with pytest.raises(RequestError, match="surrogate"):
            real(name).encode("\ud800")
        monkeypatch.undo()


@needs_data
def test_the_longest_token_bounds_the_text_of_tokens() -> None:
    assert real("tokenizers/llama-3.1").longest_token_chars == 128
    assert real("models/stories260K/tokenizer.model").longest_token_chars == 7


def gguf_bytes(values: dict[str, Any]) -> bytes:
    """Build a GGUF file without tensors."""

    def text(s: str) -> bytes:
        return struct.pack("<Q", len(s.encode())) + s.encode()

    def value(v: Any) -> tuple[int, bytes]:
        if isinstance(v, bool):
            return 7, struct.pack("<?", v)
        if isinstance(v, int):
            return 4, struct.pack("<I", v)
        if isinstance(v, float):
            return 6, struct.pack("<f", v)
        if isinstance(v, str):
            return 8, text(v)
        kinds = [value(x) for x in v] or [(4, b"")]
        return 9, struct.pack("<IQ", kinds[0][0], len(v)) + b"".join(b for _, b in kinds)

    body = b"".join(text(k) + struct.pack("<I", value(v)[0]) + value(v)[1] for k, v in values.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + body


def byte_level_meta(name: str, pre: str, bos: int | None, eos: int) -> dict[str, Any]:
    document = json.loads((DATA / "tokenizers" / name / "tokenizer.json").read_text(encoding="utf-8"))
    pieces = {i: t for t, i in document["model"]["vocab"].items()} | {
        t["id"]: t["content"] for t in document["added_tokens"]
    }
    special = {t["id"]: 3 if t["special"] else 4 for t in document["added_tokens"]}
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [pieces[i] for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [special.get(i, 1) for i in range(len(pieces))],
        "tokenizer.ggml.merges": [" ".join(m) for m in document["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.chat_template": "{{ bos_token }}!",
    }
    return meta if bos is None else meta | {"tokenizer.ggml.bos_token_id": bos}


@needs_data
@pytest.mark.parametrize(
    ("name", "pre", "vocab", "bos", "eos"),
    [("llama-3.1", "llama-bpe", "llama-bpe", 128000, 128001), ("qwen3", "qwen2", "qwen2", None, 151645)],
)
def test_byte_level_vocabulary_inside_gguf(
    tmp_path: Path, name: str, pre: str, vocab: str, bos: int | None, eos: int
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(byte_level_meta(name, pre, bos, eos)))
    ours, theirs = load_tokenizer(file), real(f"tokenizers/{name}")
    for text, ids in reference(vocab):
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == theirs.encode(text)
    assert (ours.special_ids, ours.vocab_size, ours.bos_id) == (
        theirs.special_ids,
        theirs.vocab_size,
        theirs.bos_id,
    )
    assert set(theirs.eos_ids) <= set(ours.eos_ids) and ours.eos_ids[0] == eos
    assert ours.chat_template == "{{ bos_token }}!"
    chat = "<|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|><|im_start|>y<|im_end|>"
    assert ours.encode(chat) == theirs.encode(chat)


@needs_data
def test_vocab_json_with_merges_keeps_merges_of_the_hash_character(tmp_path: Path) -> None:
    from quire.frontend.tokenizer.backends import BYTE_OF_CHAR

    vocab = {c: i for i, c in enumerate(BYTE_OF_CHAR)} | {"##": 256, "he": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n# #\nh e\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("##he") == [256, 257] and tokenizer.decode([256, 257]) == "##he"


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_split_covers_every_text(pre: str) -> None:
    from quire.frontend.tokenizer.backends import BYTE_OF_CHAR

    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(BYTE_OF_CHAR),
        "tokenizer.ggml.merges": [],
    }
    backend = gguf_backend(meta, "x.gguf")
    for text in ("Hello, it's 1234 words!\n\n  And—日本 😀 \t", "12345 a_b != <x>"):
        ids = backend.encode(text, False)
        assert b"".join(map(backend.bytes_of, ids)).decode() == text


def test_other_decoders_work_through_what_a_token_adds() -> None:
    """With a vocabulary of words, the library inserts spaces except before the first word."""
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    from quire.frontend.tokenizer.backends import JsonBackend
    from quire.frontend.tokenizer.tokenizer import TokenizerSettings

    words = Words(WordLevel({"<unk>": 0, "to": 1, "be": 2, "or": 3, "not": 4}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = Tokenizer(JsonBackend(words), TokenizerSettings())
    ids = tokenizer.encode("to be or not to be")
    assert ids == [1, 2, 3, 4, 1, 2] and tokenizer.decode(ids) == "to be or not to be"
    assert tokenizer.token_bytes(3) == b" or" and tokenizer.opening_bytes(3) == b"or"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": b"{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": b"\xff\xfe"}, "tokenizer.json cannot be read"),
        ({"tokenizer.model": b"not a model"}, "tokenizer.model cannot be read"),
        ({"tokenizer.model": b""}, "tokenizer.model cannot be read"),
        ({"tokenizer_config.json": b"[]"}, "JSON object"),
        ({"tokenizer_config.json": b"{,}"}, "not valid JSON"),
    ],
)
def test_broken_folders_are_named(tmp_path: Path, files: dict[str, bytes], says: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=says):
        load_tokenizer(tmp_path)


TINY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "a"],
    "tokenizer.ggml.scores": [0.0, 0.0],
}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be read"),
        (b"nonsense here", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (gguf_bytes(TINY)[:-3], "truncated"),
        (gguf_bytes({"a": 1})[:-8] + struct.pack("<IIQ", 9, 4, 2**50), "truncated"),
        (gguf_bytes({}), "holds no tokenizer"),
        (gguf_bytes(TINY | {"tokenizer.ggml.model": "bert"}), "kind 'bert'"),
        (gguf_bytes(TINY | {"tokenizer.ggml.scores": [0.0]}), "corrupt"),
        (gguf_bytes(TINY), "corrupt"),
        (gguf_bytes(TINY | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "martian"}), "martian"),
        (gguf_bytes(TINY | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["x y"]}), "corrupt"),
    ],
)
def test_broken_gguf_files_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=says):
        load_tokenizer(file)


@pytest.mark.parametrize("named", [0, 2, 9, None])
def test_a_gguf_vocabulary_with_several_unknown_tokens(tmp_path: Path, named: int | None) -> None:
    """Phi-3 has several unknown tokens. The additional ones are markup, as in llama.cpp."""
    tokens = ["<unk>", "<s>", "<|placeholder1|>", "<|placeholder2|>", "▁", "a", "b", "ab"]
    meta: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 4 + [-1.0, -2.0, -3.0, -1.5],
        "tokenizer.ggml.token_type": [2, 3, 2, 2, 1, 1, 1, 1],
    }
    if named is not None:
        meta["tokenizer.ggml.unknown_token_id"] = named
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(meta))
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert {0, 1, 2, 3} <= tokenizer.special_ids
    assert tokenizer.encode("ab<|placeholder2|>", add_special_tokens=False)[-2:] == [7, 3]
    assert tokenizer.encode("c", add_special_tokens=False)[-1] == (2 if named == 2 else 0)
    meta["tokenizer.ggml.token_type"] = [2, 3, 9, 2, 1, 1, 1, 1]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(meta))
    with pytest.raises(ModelError, match="token types must be 1 to 6"):
        load_tokenizer(tmp_path / "m.gguf")


@needs_data
def test_a_gguf_file_cut_anywhere_is_a_clean_error(tmp_path: Path) -> None:
    whole = (STORIES / "stories260K-F32.gguf").read_bytes()
    file = tmp_path / "m.gguf"
    for size in [*range(0, 200, 7), 3000, 9000]:
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_gguf_metadata(file)


@needs_data
def test_chat_templates_of_a_folder(tmp_path: Path) -> None:
    shutil.copy(STORIES / "tokenizer.json", tmp_path)
    config = {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).chat_templates == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.jinja").write_text("C")
    assert load_tokenizer(tmp_path).chat_template == "C"
    assert load_tokenizer(STORIES).chat_template is None


@needs_data
def test_an_end_token_that_the_vocabulary_does_not_call_special_becomes_so(tmp_path: Path) -> None:
    document = json.loads((STORIES / "tokenizer.json").read_text())
    document["added_tokens"][2] |= {"special": False, "rstrip": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_ids == [2] and tokenizer.is_special(2)
    assert tokenizer.encode("</s>  a", add_special_tokens=False) == [
        2,
        *tokenizer.encode("a", add_special_tokens=False),
    ]


def test_generation_defaults(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == {}
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "max_new_tokens": 99,
        "do_sample": True,
        "eos_token_id": [5, 6],
        "min_p": None,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert load_generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature must be a number, got 'hot'"):
        load_generation_defaults(tmp_path)


@needs_data
def test_end_of_sequence_ids_of_the_generation_config_count(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORIES / name, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load_tokenizer(tmp_path).eos_ids == [2, 7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelError, match="eos_token_id"):
        load_tokenizer(tmp_path)


@needs_data
@pytest.mark.parametrize(
    "name", ["tokenizers/qwen3", "models/stories260K", "models/stories260K/stories260K-F32.gguf"]
)
def test_half_a_surrogate_pair_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        real(name).encode("a\ud800b")


@needs_data
def test_token_text_is_readable() -> None:
    stories = real("models/stories260K")
    assert stories.token_text(403) == " Once" and stories.token_text(1) == "<s>"
    assert stories.token_bytes(3 + 0xE2) == b"\xe2" and stories.token_text(3 + 0xE2) == "�"
    assert (
        stories.token_text(99999) == "" and stories.token_id("</s>") == 2 and stories.token_id("nope") is None
    )


def test_no_tokenizer_refuses_text() -> None:
    tokenizer = NoTokenizer([2])
    assert tokenizer.eos_ids == [2] and tokenizer.chat_template is None
    for call in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([1])):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            call()
