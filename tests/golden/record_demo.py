"""Writer of demo_greedy.json: greedy answers of the demo models in float32, computed by `transformers`.

python tests/golden/record_demo.py    (after the demo weights have changed)
"""

from __future__ import annotations

import json
from pathlib import Path

import quire

HERE = Path(__file__).parent
TOKENS = 60
STORY = (
    "Vasco was a painter in the town of Westbrook. Vasco was 52 years old. On Tuesday, Vasco went to the old harbour. "
    "Vasco had a neighbour called Ines. Vasco gave the map to Ines."
)
CHATS = [
    [{"role": "user", "content": "What is 27 + 45 - 8?"}],
    [{"role": "user", "content": f"{STORY}\n\nWhere did Vasco go on Tuesday?"}],
    [{"role": "user", "content": f"{STORY}\n\nWho had the map at the end?"}],
    [
        {
            "role": "user",
            "content": f"Extract these facts about Vasco as JSON: name, age, job, town.\n\n{STORY}",
        }
    ],
    [{"role": "user", "content": "Tell me a story about a dog."}],
]
TEXTS = ["Once upon a time", "Mira lived in Oakford.", "\u00e9\u4e2d\U0001f600"]


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    demo = Path(quire.__file__).parent / "demo"
    recorded = []
    for name, folder in (("demo", "base"), ("demo-draft", "draft")):
        tokenizer = AutoTokenizer.from_pretrained(demo / folder)
        model = AutoModelForCausalLM.from_pretrained(demo / folder, dtype=torch.float32).eval()
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
        prompts += [
            tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
            for chat in CHATS
        ]
        for prompt in prompts:
            with torch.inference_mode():
                ids = model.generate(
                    torch.tensor([prompt]),
                    do_sample=False,
                    max_new_tokens=TOKENS,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            recorded.append({"model": name, "prompt": prompt, "answer": ids[0, len(prompt) :].tolist()})
    lines = ",\n".join(json.dumps(entry) for entry in recorded)
    (HERE / "demo_greedy.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
