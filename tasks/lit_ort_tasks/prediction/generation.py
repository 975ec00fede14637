"""Continues texts with a language model, by one token of each text at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lit_ort_tasks.errors import require
from lit_ort_tasks.prediction.facts import LANGUAGE_MODEL
from lit_ort_tasks.prediction.model import Model


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        tokens: the most tokens to add.
        temperature: divides the logits; 0 chooses the most probable token.
        top_k: the number of most probable tokens to draw from; None for all.
        seed: of the draws.
    """

    tokens: int = 40
    temperature: float = 0.8
    top_k: int | None = 40
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.tokens >= 1, f"tokens={self.tokens}: must be at least 1. Give more.")
        require(
            0 <= self.temperature < float("inf"),
            f"temperature={self.temperature}: must be a number of at least 0. Give 0 for the most probable tokens.",
        )
        require(self.seed >= 0, f"seed={self.seed}: must be at least 0. Give such a number, or leave it out.")
        require(
            self.top_k is None or self.top_k >= 1,
            f"top_k={self.top_k}: must be at least 1. Give more, or null for all tokens.",
        )


def continued(model: Model, texts: Sequence[str], sampling: Sampling) -> Iterator[list[str]]:
    """Yields the continuation of each text so far, after every token.

    Raises:
        InputError: the model is no language model, or a text has no token.
    """
    require(
        model.facts.kind == LANGUAGE_MODEL,
        f"The model is a {model.facts.kind}, which continues no text. Give the run of a language model.",
    )
    prompts = model.encode(texts)
    for text, ids in zip(texts, prompts, strict=True):
        require(len(ids) > 0, f"text={text!r}: has no token to continue. Give at least a word.")
    random = np.random.default_rng(sampling.seed)
    added: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))
    for _ in range(sampling.tokens):
        rows = [(prompts[k] + added[k])[-model.facts.max_length :] for k in unfinished]
        for k, logits in zip(unfinished, _last_logits(model, rows), strict=True):
            added[k].append(_draw(logits, sampling, random))
        unfinished = [k for k in unfinished if added[k][-1] != model.facts.end]
        yield [model.tokenizer.decode([i for i in ids if i != model.facts.end]) for ids in added]
        if not unfinished:
            return


def _last_logits(model: Model, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Logits for the token after each row, float32[rows, vocabulary].

    Attention is causal, so padding after the end of a shorter row changes nothing before it.
    """
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for k, row in enumerate(rows):
        ids[k, : len(row)] = row
    logits = model.run({"input_ids": ids})
    return logits[np.arange(len(rows)), [len(row) - 1 for row in rows]]


def _draw(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    # Relative to the largest, a logit divided by a tiny temperature is 0 or minus infinity.
    with np.errstate(over="ignore"):
        scaled = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -sampling.top_k)[-sampling.top_k]] = -np.inf
    weights = np.exp(scaled)
    return int(random.choice(len(weights), p=weights / weights.sum()))
