"""What quantised weights cost in quality: the table of docs/QUANTIZATION.md.

Each format is compared with the same model in fp32 on the same text: KL divergence per token, share of positions with
the same most likely token, and perplexity. Products are computed in fp32, so the figures hold for any device. The demo
model reads held-out dialogues of its generator (training/documents.py); other models read text that they sampled. With
`--tasks`, the demo model also answers held-out questions (training/evaluate.py) in its own dtype.

    python benchmarks/quality.py demo --tasks 0.1 --json quality.json
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "golden")]

from training.evaluate import cases, right  # noqa: E402
from whole import ONE_RANK, WholeSequenceAttention, logits_of  # noqa: E402

from quire import LLM, SamplingParams  # noqa: E402
from quire.attention.base import AttentionLayer, ForwardBatch  # noqa: E402
from quire.attention.entries import round_heads  # noqa: E402
from quire.frontend.location import locate_model  # noqa: E402
from quire.layers.env import Env  # noqa: E402
from quire.models.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from quire.models.config.load import load_spec  # noqa: E402
from quire.models.decoder import Model  # noqa: E402
from quire.models.registry import build_model  # noqa: E402
from quire.quant.spec import Conversion, QuantSpec  # noqa: E402

FORMATS: dict[str, tuple[Conversion | None, int]] = {
    "none": (None, 0),
    "fp8": ("fp8", 0),
    "fp8-block": ("fp8-block", 0),
    "int8": ("int8", 0),
    "int4, groups of 128": ("int4", 128),
    "int4, groups of 64": ("int4", 64),
    "int4, groups of 32": ("int4", 32),
}
KV_FORMATS = {"keys and values int8": torch.int8, "keys and values fp8": torch.float8_e4m3fn}
MAX_TOKENS = 512


class RoundedAttention(WholeSequenceAttention):
    """Attention over keys and values as a KV cache of 8-bit codes stores them."""

    def __init__(self, codes: torch.dtype) -> None:
        self.codes = codes

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        rounded = [codes.float() * scale for codes, scale in (round_heads(x, self.codes) for x in (k, v))]
        return super().forward(layer, q, *rounded, batch)


def load(
    path: Path,
    quantization: QuantSpec | None,
    dtype: torch.dtype = torch.float32,
    attention: WholeSequenceAttention | None = None,
) -> Model:
    """Load a model for whole sequences; a checkpoint that is quantised keeps its own format."""
    spec = load_spec(path)
    spec = replace(spec, quantization=spec.quantization or quantization)
    weights = open_checkpoint(path, spec)
    cpu = torch.device("cpu")
    env = Env(weights, ONE_RANK, attention or WholeSequenceAttention(), cpu, dtype, None, spec.quantization)
    with torch.inference_mode():
        model = build_model(spec, env)
    weights.finish()
    return model


def text_of(path: Path, count: int, seed: int = 0) -> list[list[int]]:
    """Return `count` sequences of token ids: dialogues for the demo model, samples of the model for others."""
    llm = LLM(str(path), device="cpu", dtype="float32", max_num_seqs=8)
    if path.parts[-2:] == ("demo", "base"):
        found = cases("new worlds", 0.02)
        step = max(1, len(found) // count)
        texts = [case.prompt + case.expected for case in found[::step]][:count]
        tokenizer = llm.get_tokenizer()
        return [tokenizer.encode(text)[:MAX_TOKENS] for text in texts]
    start = [load_spec(path).bos_token_id or 1]
    wanted = SamplingParams(temperature=1.0, max_tokens=255, ignore_eos=True, seed=seed)
    prompts: Any = [{"prompt_token_ids": start}] * count
    params = [replace(wanted, seed=seed + i) for i in range(count)]
    return [start + list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def compare(model: Model, reference: list[torch.Tensor], rows: list[list[int]]) -> dict[str, float]:
    """Return KL divergence per token, top-1 agreement and perplexity of a model."""
    divergence = agreed = loss = 0.0
    tokens = predicted = 0
    for row, wanted in zip(rows, reference):
        found = logits_of(model, [row])[0].float().log_softmax(-1)
        divergence += float((wanted.exp() * (wanted - found)).sum())
        agreed += float((wanted.argmax(-1) == found.argmax(-1)).sum())
        loss -= float(found[:-1].gather(1, torch.tensor(row[1:])[:, None]).sum())
        tokens, predicted = tokens + len(row), predicted + len(row) - 1
    return {
        "kl": divergence / tokens,
        "top1": agreed / tokens,
        "perplexity": math.exp(loss / predicted),
    }


def task_score(path: Path, form: str, share: float) -> float:
    """Return the share of held-out cases that the demo model answers exactly right."""
    convert, _ = FORMATS[form]
    settings: dict[str, Any] = {} if convert is None else {"quantization": convert}
    llm = LLM(str(path), device="cpu", max_num_seqs=16, **settings)
    found = [case for worlds in ("new worlds", "new names") for case in cases(worlds, share)]
    params = SamplingParams(temperature=0.0, max_tokens=256)
    outs = llm.generate([case.prompt for case in found], params, use_tqdm=False)
    return sum(right(case, out.outputs[0].text) for case, out in zip(found, outs)) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="demo, or a folder with a plain checkpoint")
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--folders", nargs="*", default=[], help="quantised copies, to be measured as well")
    parser.add_argument("--tasks", type=float, default=0.0, help="share of the demo model's tasks to run")
    parser.add_argument("--only-kv", action="store_true", help="leave out the formats of weights")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    path = locate_model(args.model, None).path
    rows = text_of(path, args.sequences)
    plain = load(path, None)
    reference = [logits_of(plain, [row])[0].float().log_softmax(-1) for row in rows]
    results: dict[str, dict[str, float]] = {"fp32": compare(plain, reference, rows)}
    print(f"{sum(map(len, rows))} tokens in {len(rows)} sequences")
    print(f"{'format':<28}{'KL per token':>14}{'top-1':>9}{'perplexity':>12}{'tasks':>9}")

    def show(name: str, figures: dict[str, float]) -> None:
        results[name] = figures
        tasks = f"{figures['tasks']:.1%}" if "tasks" in figures else ""
        line = (
            f"{name:<28}{figures['kl']:>14.6f}{figures['top1']:>9.2%}{figures['perplexity']:>12.4f}{tasks:>9}"
        )
        print(line, flush=True)

    show("fp32", results["fp32"])
    show("bfloat16", compare(load(path, None, torch.bfloat16), reference, rows))
    for name, codes in KV_FORMATS.items():
        show(name, compare(load(path, None, attention=RoundedAttention(codes)), reference, rows))
    for name, (convert, size) in FORMATS.items():
        if convert is None or args.only_kv:
            continue
        spec = QuantSpec(method=convert, convert=cast(Conversion, convert), group_size=size or 128)
        figures = compare(load(path, spec), reference, rows)
        if args.tasks and size in (0, 128):
            figures["tasks"] = task_score(path, name, args.tasks)
        show(name, figures)
    for folder in args.folders:
        show(Path(folder).name, compare(load(Path(folder), None), reference, rows))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
