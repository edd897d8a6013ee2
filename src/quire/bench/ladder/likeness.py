"""How much the tokens of an engine differ from those of the naive one.

Equal tokens compare greedy answers position by position. The divergence follows the naive engine's answers, so that one
differing token does not decide all later ones: KL(naive || other) at each position, over the naive engine's most likely
tokens and the rest as one more outcome, which is a lower bound of the whole sum.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.bench.drive import Bench
from quire.types import SamplingParams

_PROMPTS, _PROMPT_LEN, _ANSWER_LEN = 4, 24, 24
_MOST_LIKELY = 40

Distribution = dict[int, float]  # log-probabilities of the most likely tokens


@dataclass(slots=True)
class NaiveAnswers:
    """Prompts, the naive engine's greedy answers, and its distributions at the answers' positions."""

    prompts: list[list[int]]
    answers: list[list[int]] = field(default_factory=list)
    distributions: list[list[Distribution]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Likeness:
    """The comparison of an engine with the naive one."""

    equal_tokens: float  # share, 0 to 1
    divergence: float  # mean KL per token, in nats


def naive_answers(bench: Bench) -> NaiveAnswers:
    """Let the naive engine answer fixed random prompts."""
    r = random.Random(7)
    vocab = bench.info.vocab_size
    found = NaiveAnswers([r.choices(range(vocab), k=_PROMPT_LEN) for _ in range(_PROMPTS)])
    found.answers = greedy(bench, found.prompts)
    found.distributions = [followed(bench, *pair) for pair in zip(found.prompts, found.answers)]
    return found


def compare(bench: Bench, naive: NaiveAnswers) -> Likeness:
    """Compare an engine's answers and distributions with the naive one's."""
    equal = total = 0
    divergences: list[float] = []
    ours = greedy(bench, naive.prompts)
    for prompt, answer, mine, distributions in zip(naive.prompts, naive.answers, ours, naive.distributions):
        equal += sum(a == b for a, b in zip(mine, answer))
        total += len(answer)
        divergences += map(kl, distributions, followed(bench, prompt, answer))
    return Likeness(equal / total, statistics.fmean(divergences))


def greedy(bench: Bench, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the greedy answers to prompts, which the engine may decode together."""
    params = SamplingParams(temperature=0.0, max_tokens=_ANSWER_LEN, ignore_eos=True)
    answers: dict[str, list[int]] = {bench.add(prompt, params): [] for prompt in prompts}
    while bench.client.engine.has_work:
        for output in bench.poll([]):
            answers[output.id] += output.token_ids
    return list(answers.values())


def followed(bench: Bench, prompt: list[int], answer: Sequence[int]) -> list[Distribution]:
    """Return the distributions of an engine at each position of a given answer."""
    count = min(_MOST_LIKELY, bench.info.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=count)
    bench.add([*prompt, *answer], params)
    found: list[Distribution] = []
    while bench.client.engine.has_work:
        for output in bench.poll([]):
            found += [dict(zip(one.ids, one.logprobs)) for one in output.prompt_logprobs or ()]
    return found[len(prompt) - 1 :]  # the first entry belongs to the second token of the prompt


def kl(reference: Distribution, other: Distribution) -> float:
    """Return KL(reference || other) over the tokens that both name, and the rest as one outcome."""
    both = [token for token in reference if token in other]
    p = [math.exp(reference[token]) for token in both]
    q = [math.exp(other[token]) for token in both]
    p.append(max(1 - sum(p), 1e-12))
    q.append(max(1 - sum(q), 1e-12))
    return max(sum(a * math.log(a / b) for a, b in zip(p, q) if a > 0), 0.0)
