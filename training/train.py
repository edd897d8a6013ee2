"""Train the base model and the draft model together, on the same batches.

The draft model learns from the text and from the base model's distribution, which makes it agree with the base model
more often. Muon trains the matrices inside the layers, AdamW the embedding and the norms. The learning rate follows the
step number, or the clock if the time limit is nearer than the last step.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.data import Loader
from training.export import save_model
from training.model import BASE, DRAFT, TINY, Model, Shape, document_attention

MUON_RATE = 0.02
ADAM_RATE = 3e-3
WARM_UP = 0.02  # share of the run
SEED = 1


def orthogonalise(g: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix of each matrix of a stack by Newton-Schulz iteration."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon:
    """The Muon optimizer: momentum, then an orthogonal update. Matrices of equal shape are updated together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for p in parameters:
            self.groups.setdefault(p.shape, []).append(p)
        self.momentum = {
            shape: torch.zeros(len(ps), *shape, device=ps[0].device) for shape, ps in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float, beta: float = 0.95, decay: float = 0.01) -> None:
        for shape, ps in self.groups.items():
            g = torch.stack([p.grad for p in ps if p.grad is not None])
            m = self.momentum[shape].lerp_(g, 1 - beta)
            update = orthogonalise(g.lerp(m, beta)).float() * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(ps, 1 - rate * decay)
            torch._foreach_add_(ps, list(update.unbind()), alpha=-rate)


class Trainer:
    """A model with its two optimizers."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.model = Model(shape).to(device)
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda"
        )
        if device == "cuda":
            for layer in self.model.model.layers:
                layer.compile()  # all layers share the compiled code

    def update(self, loss: Tensor, scale: float) -> None:
        loss.backward()
        self.muon.step(MUON_RATE * scale)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        self.adam.step()
        self.model.zero_grad(set_to_none=True)


def hard_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / weights.sum()


def soft_loss(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Compute the cross entropy against the teacher's distribution."""
    p = teacher.float().softmax(-1)
    loss = -(p * logits.float().log_softmax(-1)).sum(-1)
    return (loss * weights).sum() / weights.sum()


def schedule(progress: float) -> float:
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


def train(
    out: Path,
    tokenizer_file: Path,
    steps: int,
    minutes: float,
    rows: int,
    workers: int,
    device: str,
    shapes: tuple[Shape, Shape] = (BASE, DRAFT),
) -> dict[str, float]:
    started = time.monotonic()
    torch.manual_seed(SEED)
    loader = Loader(tokenizer_file, workers, rows, pin=device == "cuda")
    base, draft = (Trainer(shape, device) for shape in shapes)
    hard, soft = (torch.compile(f) if device == "cuda" else f for f in (hard_loss, soft_loss))
    log, seen, step, waited = [], 0, 0, 0.0
    batches, origin = iter(loader), started
    for step in range(steps):
        begun = time.monotonic()
        if step <= 5:
            origin = begun  # the clock of the schedule leaves out compilation
        progress = max(step / steps, (begun - origin) / (60 * minutes - (origin - started)))
        if progress >= 1:
            break
        parts = next(batches)
        waited += time.monotonic() - begun
        on_device = [part.to(device, non_blocking=True) for part in parts]
        tokens, weights, documents = on_device[0].long(), on_device[1].float(), on_device[2].int()
        attend, state = document_attention(documents[:, :-1].contiguous())
        inputs, targets, weights = tokens[:, :-1], tokens[:, 1:], weights[:, 1:].contiguous()
        scale = schedule(progress)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = base.model.logits(base.model(inputs, attend, state))
            loss = hard(logits, targets, weights)
            teacher = logits.detach()
            draft_logits = draft.model.logits(draft.model(inputs, attend, state))
            draft_hard = hard(draft_logits, targets, weights)
            draft_loss = 0.5 * draft_hard + 0.5 * soft(draft_logits, teacher, weights)
        base.update(loss, scale)
        draft.update(draft_loss, scale)
        seen += inputs.numel()
        if step % 50 == 0 or step + 1 == steps:
            entry = {
                "step": step,
                "seconds": round(time.monotonic() - started, 1),
                "tokens": seen,
                "loss": round(loss.item(), 4),
                "draft_loss": round(draft_hard.item(), 4),
                "rate": round(scale, 4),
                "waited_s": round(waited, 1),
            }
            log.append(entry)
            if step % 200 == 0 or step < 200:
                print(json.dumps(entry), flush=True)
    loader.close()
    save_model(base.model, out / "base", tokenizer_file.parent, shards=2)
    save_model(draft.model, out / "draft", tokenizer_file.parent, shards=1)
    (out / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    return log[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the base and the draft model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--steps", type=int, default=8400)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="time limit; the schedule then ends with it"
    )
    parser.add_argument("--rows", type=int, default=48, help="rows of 2,048 tokens in a batch")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="train two very small models, to try the script")
    args = parser.parse_args()
    shapes = (TINY, TINY) if args.tiny else (BASE, DRAFT)
    args.out.mkdir(parents=True, exist_ok=True)
    print(
        train(
            args.out,
            args.tokenizer / "tokenizer.json",
            args.steps,
            args.minutes,
            args.rows,
            args.workers,
            args.device,
            shapes,
        )
    )


if __name__ == "__main__":
    main()
