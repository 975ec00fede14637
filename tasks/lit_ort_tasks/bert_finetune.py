"""Sequence classification with BERT: fine-tuning as in Devlin et al. 2018, section 4.1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

from lit_ort_tasks.base import Figures, Task
from lit_ort_tasks.bert import make_bert
from lit_ort_tasks.data.batches import Batch
from lit_ort_tasks.errors import require
from lit_ort_tasks.huggingface import HuggingFaceTask, plain_tokenizer, require_sizes, require_vocabulary
from lit_ort_tasks.inference import Inference, Logits, bert_example, changing
from lit_ort_tasks.optimization import ScheduleFactory
from lit_ort_tasks.prediction.facts import CLASSIFIER, Facts

ADAMW = partial(torch.optim.AdamW, lr=3e-5)

# A confusion matrix of more has no numbers and names.
_MOST_CLASSES = 30


class BertFinetune(HuggingFaceTask, Task):
    """Trains `BertForSequenceClassification` to classify texts or pairs of texts.

    Args:
        tokenizer: from the data.
        labels: the names of the classes, from the data.
        optimizer: creates the optimizer from the parameters.
        scheduler: creates the learning-rate schedule; None keeps the learning rate.
        max_length: the longest sequence, from the data.
        pretrained: a checkpoint of task=bert_pretrain, a folder of `save_pretrained`, or a name on the hub; None
            creates a random model of `layers`, `heads` and `width`, with a feed-forward of 4 widths.
        dropout: of embeddings, attention, layers and the classifier's input.

    Logs loss and accuracy; for validation and test also the macro F1 and, as an image, the confusion matrix.

    Raises:
        InputError: a size is invalid, or the tokenizer or the length exceeds the model's.
    """

    headline = ("accuracy", "macro_f1")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        labels: Sequence[str],
        optimizer: Any = ADAMW,
        scheduler: ScheduleFactory | None = None,
        *,
        max_length: int = 128,
        pretrained: str | os.PathLike[str] | None = None,
        layers: int = 2,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(optimizer, scheduler)
        sizes: dict[str, Any] = dict(layers=layers, heads=heads, width=width, dropout=dropout)
        require_sizes(**sizes)
        self.save_hyperparameters(dict(pretrained=pretrained, labels=list(labels), **sizes), logger=False)
        self.tokenizer = tokenizer
        self.labels = [str(label) for label in labels]
        names: dict[str, Any] = dict(
            id2label=dict(enumerate(self.labels)), label2id={label: k for k, label in enumerate(self.labels)}
        )
        self.model = make_bert(
            BertForSequenceClassification,
            pretrained,
            vocabulary_size=len(tokenizer),
            positions=max_length,
            **sizes,
            **names,
        )
        require_vocabulary(max(tokenizer.get_vocab().values()), self.model.config.vocab_size, pretrained)
        longest = self.model.config.max_position_embeddings
        require(
            max_length <= longest,
            f"data.max_length={max_length}: the model {pretrained} has at most {longest} tokens. Give a shorter "
            "length.",
        )
        self.f1 = MulticlassF1Score(len(self.labels), average="macro")
        self.confusion = MulticlassConfusionMatrix(len(self.labels))

    def inference(self, data: Any) -> Inference:
        """Return the model that computes logits, float32[batch, labels], from input_ids, token_type_ids and
        attention_mask, int64[batch, length] each.
        """
        shape = self.model.config
        batch = bert_example(shape)
        facts = Facts(
            CLASSIFIER, shape.max_position_embeddings, tuple(self.labels), pairs=data.corpus.train.pairs is not None
        )
        return Inference(Logits(self.model), batch, changing(list(batch)), plain_tokenizer(self.tokenizer), facts)

    def figures(self, batch: Batch) -> Figures:
        """Return the mean loss and accuracy, float32[] each, and the predicted classes, int64[batch].

        Args:
            batch: input_ids, token_type_ids, attention_mask, int64[batch, length], and labels, int64[batch].
        """
        logits = self.model(
            input_ids=batch["input_ids"],
            token_type_ids=batch["token_type_ids"],
            attention_mask=batch["attention_mask"],
        ).logits
        predictions = logits.detach().argmax(-1)
        return {
            "loss": F.cross_entropy(logits, batch["labels"]),
            "accuracy": (predictions == batch["labels"]).float().mean(),
            "predictions": predictions,
        }

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": len(batch["labels"]), "accuracy": len(batch["labels"])}

    def _evaluate(self, outputs: Any, batch: Batch) -> None:
        super()._evaluate(outputs, batch)
        self.f1.update(outputs["predictions"], batch["labels"])
        self.confusion.update(outputs["predictions"], batch["labels"])

    def _log_evaluation(self, split: str) -> None:
        super()._log_evaluation(split)
        self.log(f"{split}/macro_f1", self.f1.compute(), prog_bar=True, sync_dist=True)
        # Computed by all processes together, also where only the first one draws it.
        self._draw_confusion(split, self.confusion.compute())
        self.f1.reset()
        self.confusion.reset()

    def _draw_confusion(self, split: str, matrix: Tensor) -> None:
        # In other processes Lightning's loggers have writers with any method.
        if not self.trainer.is_global_zero:
            return
        writers: list[Any] = [getattr(logger, "experiment", None) for logger in self.loggers]
        # The numbers of more classes couldn't be read, and take minutes to lay out. A pair of `$` would be a formula.
        with_numbers = len(matrix) <= _MOST_CLASSES
        names = [label.replace("$", r"\$") for label in self.labels]
        for writer in writers:
            if hasattr(writer, "add_figure"):
                figure = Figure(figsize=(9, 8), layout="constrained")
                axes = figure.subplots()
                if with_numbers:
                    self.confusion.plot(matrix, ax=axes, labels=names)
                else:
                    axes.imshow(matrix.cpu())
                    axes.set(xlabel="Predicted class", ylabel="True class")
                writer.add_figure(f"{split}/confusion", figure, self.trainer.global_step)
