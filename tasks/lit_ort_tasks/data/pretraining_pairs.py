"""Sentences, and the pairs of them for BERT's second objective: does B follow A in the text?

Source: Devlin et al. 2018 (https://arxiv.org/abs/1810.04805), section 3.1, task 2 and appendix A.2, as
`create_pretraining_data.py` of https://github.com/google-research/bert makes them. Three things differ, so that the
labels are fair coin tosses and a true pair stays adjacent:

- A chunk has two sentences where the document has them, however long the first is. There, one long sentence is a chunk,
  and its B always random.
- A document's last sentence, left over alone, makes no pair with a random B unless it is the whole document.
- A pair that is too long loses the beginning of A and the end of B. There, either end of either.

No pair is cut short on purpose (there, one in ten).
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
    """The sentences of a document: they end with a line, and after `.`, `!` or `?` (and a closing quote or bracket)
    that white space follows. Abbreviations are not known, so "e.g. this" is two."""
    return [part for part in (piece.strip() for piece in _SENTENCE_END.split(document)) if part]


@dataclass(frozen=True)
class Sentences:
    """The tokens of a split.

    ids: int32[tokens]: all sentences one after the other.
    sentences: int64[sentences + 1]: where each begins in `ids`, and where the last ends.
    documents: int64[documents + 1]: where each begins in `sentences`, and where the last ends.
    """

    ids: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        """Documents."""
        return len(self.documents) - 1


def tokenize_sentences(
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[str],
    source: str,
    cache_dir: str | os.PathLike[str] | None,
) -> Sentences:
    """The tokens of these documents, memory-mapped from the cache; sentences and documents without tokens are left out.

    source: where the documents are from; error messages begin with it.

    Raises InputError for fewer than two documents with tokens, and where the cache can't be written.
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
    """Pairs from all documents in their order, int64[pairs, 5]: the bounds of A and of B in `text.ids`, the label.

    Each document is read in chunks of sentences of at least `max_tokens` tokens, and each chunk is cut at random into A
    and the rest. By a coin toss B is the rest, or comes from a random place of another document; then the rest goes
    back, to be read again. A document of one sentence has no rest. A pair has at most `max_tokens` tokens.
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
            b_start, b_stop = _elsewhere(text, document, max_tokens - (a_stop - a_start), random)
            pairs.append((a_start, a_stop, b_start, b_stop, RANDOM_NEXT))
            first = cut
        else:
            pairs.append((a_start, a_stop, a_stop, int(starts[stop]), TRUE_NEXT))
            first = stop
        alone = False
    return pairs


def _enough(starts: np.ndarray, first: int, end: int, tokens: int) -> int:
    """The first sentence up to which those from `first` on have that many tokens, or `end`."""
    return first + 1 + int(np.searchsorted(starts[first + 1 : end], starts[first] + tokens))


def _elsewhere(text: Sentences, document: int, tokens: int, random: np.random.Generator) -> tuple[int, int]:
    """Sentences from a random one on in another document, enough for that many tokens."""
    other = int(random.integers(len(text) - 1))
    other += other >= document
    begin, end = int(text.documents[other]), int(text.documents[other + 1])
    first = int(random.integers(begin, end))
    stop = _enough(text.sentences, first, end, tokens)
    return int(text.sentences[first]), int(text.sentences[stop])


def _truncate(pairs: np.ndarray, max_tokens: int) -> np.ndarray:
    """The longer of A and B gives way until both fit: A loses its beginning, B its end."""
    a_tokens = pairs[:, A_STOP] - pairs[:, A_START]
    b_tokens = pairs[:, B_STOP] - pairs[:, B_START]
    half = max_tokens // 2
    a_kept = np.minimum(a_tokens, np.maximum(max_tokens - b_tokens, max_tokens - half))
    b_kept = np.minimum(b_tokens, max_tokens - a_kept)
    pairs[:, A_START] = pairs[:, A_STOP] - a_kept
    pairs[:, B_STOP] = pairs[:, B_START] + b_kept
    return pairs
