"""Extract facts from texts as JSON. The grammar of the schema allows no other answer."""

from __future__ import annotations

import argparse
import json

from quire import LLM, SamplingParams, StructuredOutputsParams

TEXTS = ["Mira is 7 years old and lives in Oakford.", "Tom, who is 34, has moved to Westbrook."]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "town": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "town"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    constraint = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=120, structured_outputs=constraint)
    chats = [[{"role": "user", "content": f"Who is this? {text}"}] for text in TEXTS]
    with LLM(args.model) as llm:
        for text, result in zip(TEXTS, llm.chat(chats, params, use_tqdm=False)):
            print(text, "->", json.loads(result.outputs[0].text))


if __name__ == "__main__":
    main()
