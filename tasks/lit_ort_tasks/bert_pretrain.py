"""BERT's pre-training: masked words and next sentences (Devlin et al. 2018, https://arxiv.org/abs/1810.04805)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertForPreTraining, PreTrainedTokenizerFast

from lit_ort_tasks.base import Figures, Task
from lit_ort_tasks.bert import make_bert
from lit_ort_tasks.data.batches import IGNORED, Batch
from lit_ort_tasks.errors import require
from lit_ort_tasks.huggingface import HuggingFaceTask, plain_tokenizer, require_sizes, require_vocabulary
from lit_ort_tasks.inference import Inference, Logits, bert_example, changing
from lit_ort_tasks.optimization import ScheduleFactory
from lit_ort_tasks.prediction.facts import MASKED_MODEL, Facts

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def pretraining_figures(model: Any, batch: Batch) -> Figures:
    """Return the losses of masked words and next sentences, their sum, and the accuracy of the latter; float32[] each.

    Args:
        batch: input_ids, token_type_ids, attention_mask, labels, int64[batch, length], and next_sentence_label,
            int64[batch]; labels are -100 where nothing is predicted.
    """
    outputs = model(
        input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"], attention_mask=batch["attention_mask"]
    )
    words, follows = outputs.prediction_logits, outputs.seq_relationship_logits
    mlm_loss = F.cross_entropy(words.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
    nsp_loss = F.cross_entropy(follows, batch["next_sentence_label"])
    correct = (follows.detach().argmax(-1) == batch["next_sentence_label"]).float()
    return {
        "loss": mlm_loss + nsp_loss,
        "mlm_loss": mlm_loss.detach(),
        "nsp_loss": nsp_loss.detach(),
        "nsp_accuracy": correct.mean(),
    }


class BertPretrain(HuggingFaceTask, Task):
    """Trains `BertForPreTraining` on masked words (MLM) and on whether the second text follows the first (NSP).

    Args:
        tokenizer: from the data; None where the data has ids alone.
        optimizer: creates the optimizer from the parameters.
        scheduler: creates the learning-rate schedule; None keeps the learning rate.
        vocabulary_size: from the data.
        max_length: the longest sequence of this phase, from the data.
        pretrained: a checkpoint of an earlier phase, a folder of `save_pretrained`, or a name on the hub; None creates
            a random model of `layers`, `heads` and `width`, with a feed-forward of 4 widths.
        positions: the longest sequence of a random model in all phases; those of a later phase can be longer.
        dropout: of embeddings, attention and layers.

    Logs loss (the sum of the next two), mlm_loss (mean over the masked words), nsp_loss and nsp_accuracy (over pairs).

    Raises:
        InputError: a size is invalid, or the vocabulary or the length exceeds the model's.
    """

    headline = ("mlm_loss", "nsp_accuracy")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | None,
        optimizer: Any = ADAMW,
        scheduler: ScheduleFactory | None = None,
        *,
        vocabulary_size: int,
        max_length: int = 128,
        pretrained: str | os.PathLike[str] | None = None,
        layers: int = 4,
        heads: int = 4,
        width: int = 256,
        positions: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(optimizer, scheduler)
        sizes: dict[str, Any] = dict(layers=layers, heads=heads, width=width, positions=positions, dropout=dropout)
        require_sizes(**sizes)
        self.save_hyperparameters(dict(pretrained=pretrained, **sizes), logger=False)
        self.tokenizer = tokenizer
        self.model = make_bert(BertForPreTraining, pretrained, vocabulary_size=vocabulary_size, **sizes)
        require_vocabulary(vocabulary_size - 1, self.model.config.vocab_size, pretrained)
        longest = self.model.config.max_position_embeddings
        require(
            max_length <= longest,
            f"data.max_length={max_length}: the model has at most {longest} tokens (model.positions). Give a shorter "
            "length, or more positions.",
        )

    def inference(self, data: Any) -> Inference:
        """Return the model that computes the logits of words, float32[batch, length, vocabulary], from input_ids,
        token_type_ids and attention_mask, int64[batch, length] each.
        """
        assert self.tokenizer is not None, "require_exportable() checks it"
        shape = self.model.config
        facts = Facts(MASKED_MODEL, shape.max_position_embeddings)
        module, batch = Logits(self.model, "prediction_logits"), bert_example(shape)
        return Inference(module, batch, changing(list(batch)), plain_tokenizer(self.tokenizer), facts)

    def figures(self, batch: Batch) -> Figures:
        return pretraining_figures(self.model, batch)

    def counts(self, batch: Batch) -> dict[str, int]:
        pairs = len(batch["input_ids"])
        masked = int((batch["labels"] != IGNORED).sum())
        return {"mlm_loss": masked, "nsp_loss": pairs, "nsp_accuracy": pairs}

    def derived(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # A mean over batches would weight the masked words by the pairs of their batch.
        return {"loss": means["mlm_loss"] + means["nsp_loss"]}
