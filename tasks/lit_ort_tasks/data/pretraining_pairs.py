"""Sentences, and the pairs of them for BERT's second objective: does B follow A in the text?

Source: Devlin et al. 2018 (https://arxiv.org/abs/1810.04805), section 3.1, task 2 and appendix A.2, and its
`create_pretraining_data.py` of https://github.com/google-research/bert. Three points differ, so that both labels have
the probability 0.5 and a true pair stays adjacent:

- A chunk has two sentences if the document has them, even if the first one is long. In the source, one long sentence is
  a chunk, and its B is always random.
- The last sentence of a document, if it remains alone, forms no pair with a random B unless it is the whole document.
- A pair that is too long loses the beginning of A and the end of B. In the source, either end of either.

No pair is shortened at random (in the source, one in ten).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from lit_ort_tasks.data.token_cache import Arrays, cached_arrays, content_key
from lit_ort_tasks.data.tokenization import encode_documents, tokenizer_text
from lit_ort_tasks.errors import require

# [CLS] A [SEP] B [SEP]
SPECIALS_OF_A_PAIR = 3
# Columns of drawn pairs: the tokens of A, the tokens of B, and next_sentence_label.
A_START, A_STOP, B_START, B_STOP, LABEL = range(5)
TRUE_NEXT, RANDOM_NEXT = 0, 1

_SENTENCE_END = re.compile(r"""\n|(?<=[.!?])\s+|(?<=[.!?]["')\]])\s+""")


def split_sentences(document: str) -> list[str]:
    """Return the sentences of a document.

    A sentence ends at the end of a line, and at white space after `.`, `!` or `?` (and a closing quote or bracket).
    Abbreviations are not recognized: "e.g. this" is two sentences.
    """
    return [part for part in (piece.strip() for piece in _SENTENCE_END.split(document)) if part]


@dataclass(frozen=True)
class Sentences:
    """The tokens of a split.

    Args:
        ids: int32[tokens]: the concatenated sentences.
        sentences: int64[sentences + 1]: the start of each sentence in `ids`, and the end of the last one.
        documents: int64[documents + 1]: the start of each document in `sentences`, and the end of the last one.
    """

    ids: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents) - 1


def tokenize_sentences(
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[str],
    source: str,
    cache_dir: str | os.PathLike[str] | None,
) -> Sentences:
    """Return the tokens of documents, memory-mapped from the cache, without empty sentences and documents.

    Args:
        source: of the documents; error messages begin with it.

    Raises:
        InputError: fewer than two documents have tokens, or the cache can't be written.
    """
    key = content_key(
        documents, made="sentences", tokenizer=tokenizer_text(tokenizer), sentence_end=_SENTENCE_END.pattern
    )
    arrays = cached_arrays(cache_dir, key, lambda: _tokenize(tokenizer, documents, source))
    return Sentences(arrays["ids"], arrays["sentences"], arrays["documents"])


def _tokenize(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], source: str) -> Arrays:
    split = [split_sentences(document) for document in documents]
    encoded = encode_documents(tokenizer, [sentence for document in split for sentence in document])
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    owners = np.repeat(np.arange(len(split)), [len(document) for document in split])
    in_document = np.bincount(owners[lengths > 0], minlength=len(split))
    in_document = in_document[in_document > 0]
    require(
        len(in_document) >= 2,
        f"{source}: {len(in_document)} documents with text, and a random next sentence comes from another document, so "
        "at least 2 are needed. Give more text, with blank lines between documents.",
    )
    return {
        "ids": np.concatenate(encoded),
        "sentences": np.concatenate([[0], np.cumsum(lengths[lengths > 0])]),
        "documents": np.concatenate([[0], np.cumsum(in_document)]),
    }


def draw_pairs(text: Sentences, max_tokens: int, random: np.random.Generator) -> np.ndarray:
    """Return pairs from all documents in order, int64[pairs, 5]: the bounds of A and of B in `text.ids`, and the label.

    Each document is read in chunks of sentences with at least `max_tokens` tokens, and each chunk is split at random
    into A and the rest. With the probability 0.5, B is the rest. Otherwise B is from a random position of another
    document, and the rest is read again. A document of one sentence has no rest. Pairs have up to `max_tokens` tokens.
    """
    pairs = [pair for document in range(len(text)) for pair in _pairs_of(text, document, max_tokens, random)]
    return _truncate(np.array(pairs, dtype=np.int64).reshape(-1, 5), max_tokens)


def _pairs_of(
    text: Sentences, document: int, max_tokens: int, random: np.random.Generator
) -> list[tuple[int, int, int, int, int]]:
    starts = text.sentences
    first, end = int(text.documents[document]), int(text.documents[document + 1])
    alone = end - first == 1
    pairs: list[tuple[int, int, int, int, int]] = []
    while end - first >= 2 or alone:
        stop = max(_enough(starts, first, end, max_tokens), min(first + 2, end))
        cut = first + 1 if alone else int(random.integers(first + 1, stop))
        a_start, a_stop = int(starts[first]), int(starts[cut])
        if alone or random.random() < 0.5:
            b_start, b_stop = _random_next(text, document, max_tokens - (a_stop - a_start), random)
            pairs.append((a_start, a_stop, b_start, b_stop, RANDOM_NEXT))
            first = cut
        else:
            pairs.append((a_start, a_stop, a_stop, int(starts[stop]), TRUE_NEXT))
            first = stop
        alone = False
    return pairs


def _enough(starts: np.ndarray, first: int, end: int, tokens: int) -> int:
    """Return the end of the sentences from `first` that have at least this number of tokens, at most `end`."""
    return first + 1 + int(np.searchsorted(starts[first + 1 : end], starts[first] + tokens))


def _random_next(text: Sentences, document: int, tokens: int, random: np.random.Generator) -> tuple[int, int]:
    """Return the bounds of sentences from a random one in another document, with at least this number of tokens."""
    other = int(random.integers(len(text) - 1))
    other += other >= document
    begin, end = int(text.documents[other]), int(text.documents[other + 1])
    first = int(random.integers(begin, end))
    stop = _enough(text.sentences, first, end, tokens)
    return int(text.sentences[first]), int(text.sentences[stop])


def _truncate(pairs: np.ndarray, max_tokens: int) -> np.ndarray:
    """Shortens the longer of A and B until both fit: A loses its beginning, B its end."""
    a_tokens = pairs[:, A_STOP] - pairs[:, A_START]
    b_tokens = pairs[:, B_STOP] - pairs[:, B_START]
    half = max_tokens // 2
    a_length = np.minimum(a_tokens, np.maximum(max_tokens - b_tokens, max_tokens - half))
    b_length = np.minimum(b_tokens, max_tokens - a_length)
    pairs[:, A_START] = pairs[:, A_STOP] - a_length
    pairs[:, B_STOP] = pairs[:, B_START] + b_length
    return pairs
