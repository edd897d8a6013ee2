"""Incremental decoding gives the same text for any chunks, and stop strings never leak."""

from __future__ import annotations

import codecs
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.tokenizer.detokenizer import Detokenizer, StopStrings
from quire.frontend.tokenizer.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
NAMES = [
    "tokenizers/llama-3.1",
    "tokenizers/qwen3",
    "models/stories260K",
    "models/stories260K/tokenizer.model",
]
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is absent")
_loaded: dict[str, Tokenizer] = {}


def real(name: str) -> Tokenizer:
    if name not in _loaded:
        _loaded[name] = load_tokenizer(DATA / name)
    return _loaded[name]


def stream(detokenizer: Detokenizer, ids: list[int]) -> str:
    text = ""
    for token in ids:
        new = detokenizer.push([token])
        text += new
    return text + detokenizer.finish()


def complete_characters(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """Return the text of a prompt without its incomplete last character."""
    kept = [i for i in ids if not (skip and tokenizer.is_special(i))]
    raw = b"".join(map(tokenizer.token_bytes, kept))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


@st.composite
def token_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Return a random sequence of encoded texts, loose bytes (mostly invalid UTF-8) and special tokens."""
    special = sorted(tokenizer.special_ids)
    single_bytes = [i for i in range(300) if len(tokenizer.token_bytes(i)) == 1]
    part = st.one_of(
        st.text(max_size=8).map(lambda t: tokenizer.encode(t, add_special_tokens=False)),
        st.sampled_from(["😀", "👩‍👩‍👧 ", "日本", " é"]).map(
            lambda t: tokenizer.encode(t, add_special_tokens=False)
        ),
        st.lists(st.sampled_from(single_bytes), max_size=5),
        st.sampled_from(special).map(lambda i: [i]),
        st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=5),
    )
    return [i for ids in draw(st.lists(part, max_size=6)) for i in ids]


@needs_data
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_stream_is_the_text_of_the_whole_in_context(name: str, data: st.DataObject) -> None:
    tokenizer = real(name)
    prompt = data.draw(token_lists(tokenizer))
    output = data.draw(token_lists(tokenizer))
    skip = data.draw(st.booleans())
    # The text of a sequence cannot be cut at a leading space that some vocabularies drop: put a letter first.
    letter = tokenizer.encode("x", add_special_tokens=False)
    whole = tokenizer.decode(letter + prompt + output, skip)
    before = complete_characters(tokenizer, letter + prompt, skip)
    before = before[1:] if before.startswith(" ") else before
    streamed = stream(Detokenizer(tokenizer, letter + prompt, skip), output)
    assert before + streamed == whole
    cut = data.draw(st.integers(0, len(output)))
    chunked = Detokenizer(tokenizer, letter + prompt, skip)
    assert chunked.push(output[:cut]) + chunked.push(output[cut:]) + chunked.finish() == streamed


@needs_data
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_without_a_prompt_the_stream_is_the_decoded_output(name: str, data: st.DataObject) -> None:
    tokenizer = real(name)
    output = data.draw(token_lists(tokenizer))
    skip = data.draw(st.booleans())
    assert stream(Detokenizer(tokenizer, [], skip), output) == tokenizer.decode(output, skip)


@needs_data
@pytest.mark.parametrize("name", NAMES)
def test_no_half_characters(name: str) -> None:
    tokenizer = real(name)
    text = "Family: 👩‍👩‍👧 日本語 𒀀 naïve 🦙"
    detokenizer = Detokenizer(tokenizer, [])
    parts = [detokenizer.push([i]) for i in tokenizer.encode(text)]
    assert "".join(parts) == text and not any("\ufffd" in p for p in parts) and detokenizer.finish() == ""
    assert any(p == "" for p in parts)


@needs_data
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_begun_by_the_prompt_is_completed(cut: int) -> None:
    stories = real("models/stories260K")
    ids = [3 + b for b in "é😀".encode()]  # the vocabulary's 256 byte tokens begin at 3
    assert stream(Detokenizer(stories, ids[: 2 + cut]), ids[2 + cut :]) == "😀"


@needs_data
def test_sentencepiece_keeps_the_space_of_a_continuation_and_drops_that_of_a_beginning() -> None:
    stories = real("models/stories260K")
    ids = stories.encode("Once upon", add_special_tokens=False)
    assert stream(Detokenizer(stories, [1]), ids) == "Once upon"
    assert stream(Detokenizer(stories, stories.encode("Hi.")), ids) == " Once upon"
    shown = Detokenizer(stories, [], skip_special_tokens=False)
    assert stream(shown, [1, *ids, 2]) == "<s> Once upon</s>"


@needs_data
def test_spaces_between_special_tokens_can_be_removed() -> None:
    """No decoder here adds such spaces, so both settings must give the same text."""
    qwen = real("tokenizers/qwen3")
    ids = qwen.encode("<|im_start|><|im_end|> a <|im_end|>")
    for spaces in (True, False):
        text = stream(Detokenizer(qwen, [], False, spaces), ids)
        assert text == "<|im_start|><|im_end|> a <|im_end|>"


@needs_data
def test_the_cost_of_a_token_does_not_grow() -> None:
    tokenizer = real("models/stories260K")
    detokenizer = Detokenizer(tokenizer, [])

    def measure(count: int) -> float:
        began = time.thread_time()  # what others take of the processor does not count
        for _ in range(count):
            detokenizer.push([3 + 0x80])  # never a whole character: the worst case
        return time.thread_time() - began

    first = measure(20_000)
    measure(100_000)
    assert measure(20_000) < 5 * first + 0.05


# ------------------------------------------------------------------------------------ stop strings


def by_character(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Cut by definition: at the first character where the text so far ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = sorted((s for s in stops if text[:end].endswith(s)), key=len, reverse=True)
        if hits:
            return (text[:end] if include else text[: end - len(hits[0])]), hits[0]
    return text, None


alphabet = st.sampled_from("ab\n")
stop_lists = st.lists(st.text(alphabet, min_size=1, max_size=5), min_size=0, max_size=4)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text(alphabet, max_size=4), max_size=12), stop_lists, st.booleans())
def test_stop_strings_do_not_leak_in_any_split(pieces: list[str], stops: list[str], include: bool) -> None:
    expected, reason = by_character("".join(pieces), stops, include)
    found = StopStrings(stops, include)
    shown = ""
    for piece in pieces:
        safe, stopped = found.push(piece)
        shown += safe
        assert expected.startswith(shown), "nothing is shown that the final text does not begin with"
        if stopped is not None:
            break
    shown += found.finish()
    assert (shown, found.stopped) == (expected, reason)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet, max_size=12), stop_lists, st.booleans())
def test_every_split_in_two_and_single_characters_agree(text: str, stops: list[str], include: bool) -> None:
    splits = [[text[:i], text[i:]] for i in range(len(text) + 1)] + [list(text)]
    results = set()
    for pieces in splits:
        found = StopStrings(stops, include)
        results.add(("".join(found.push(p)[0] for p in pieces) + found.finish(), found.stopped))
    assert results == {by_character(text, stops, include)}


def test_no_more_than_needed_is_held_back() -> None:
    found = StopStrings(["\n\nUser:"])
    assert found.push("Hello\n") == ("Hello", None)
    assert found.push("x") == ("\nx", None)
    assert found.push("a\n\nUs") == ("a", None)
    assert found.push("er: no") == ("", "\n\nUser:")
    assert found.push("more") == ("", "\n\nUser:") and found.finish() == ""
