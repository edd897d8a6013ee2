"""A byte-level BPE tokenizer of 2,048 tokens, trained on the generator's text.

It encodes any text, because all 256 bytes are tokens. Each digit is a token, so that the model can add digit by digit.
The tags of tool calls are single tokens but not special ones, so decoding keeps them. Run it as
`python -m training.tokenizer --out DIR`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START
from training.documents import training_document

VOCABULARY = 2048
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# The pattern of GPT-style tokenizers, with single digits.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TOKENIZER_SEED = 1 << 39  # documents from here on; training counts up from 0 and never gets here


def corpus(documents: int) -> Iterator[str]:
    for i in range(documents):
        text = "".join(part for part, _ in training_document(TOKENIZER_SEED + i))
        for mark in (*SPECIAL, *TAGS):
            text = text.replace(mark, "\n")
        yield text


def train_tokenizer(documents: int = 20_000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(documents), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(t)): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": t in SPECIAL,
        }
        for t in (*SPECIAL, *TAGS)
    }
    config = {
        "added_tokens_decoder": added,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": context,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo tokenizer.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=20_000)
    args = parser.parse_args()
    save(train_tokenizer(args.documents), args.out, context=2048)


if __name__ == "__main__":
    main()
