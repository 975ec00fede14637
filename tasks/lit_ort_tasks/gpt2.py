"""GPT-2 as a language model of text: from scratch or from pre-trained weights (Radford et al. 2019)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lit_ort.distributed.tensor_parallel import is_sharded
from lit_ort_tasks.base import Figures, LanguageModel
from lit_ort_tasks.data.batches import IGNORED, Batch
from lit_ort_tasks.data.text_blocks import count_targets
from lit_ort_tasks.errors import require
from lit_ort_tasks.huggingface import HuggingFaceTask, load_model, plain_tokenizer, require_sizes, require_vocabulary
from lit_ort_tasks.inference import Inference, Logits, changing, example
from lit_ort_tasks.optimization import ScheduleFactory
from lit_ort_tasks.prediction.facts import LANGUAGE_MODEL, Facts

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
LOSS = partial(F.cross_entropy, ignore_index=IGNORED)


def next_token_loss(model: Any, batch: Batch, cross_entropy: Callable[[Tensor, Tensor], Tensor] = LOSS) -> Tensor:
    """Return the mean cross entropy of the targets, float32[].

    Args:
        batch: input_ids and targets, int64[batch, block]; targets of -100 are ignored.
    """
    logits = model(batch["input_ids"], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class GPT2(HuggingFaceTask, LanguageModel):
    """Trains `GPT2LMHeadModel` to predict the next token.

    Args:
        tokenizer: from the data.
        optimizer: creates the optimizer from the parameters.
        scheduler: creates the learning-rate schedule; None keeps the learning rate.
        max_length: the longest sequence, from the data.
        pretrained: a folder of `save_pretrained`, or a name on the hub; None creates a random model of `layers`,
            `heads` and `width`.
        dropout: of embeddings, attention and residuals; None keeps that of the pre-trained model (0.1 in a random one).
        sample_prompt: the start of a text that is generated and logged after each validation, except with
            `strategy=ort_tensor`.
        sample_tokens: the number of its generated tokens; 0 for no text.

    Raises:
        InputError: a size is invalid, or the tokenizer or the length exceeds the pre-trained model's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        optimizer: Any = ADAMW,
        scheduler: ScheduleFactory | None = None,
        *,
        max_length: int = 128,
        pretrained: str | os.PathLike[str] | None = None,
        layers: int = 4,
        heads: int = 4,
        width: int = 256,
        dropout: float | None = None,
        sample_prompt: str = "The",
        sample_tokens: int = 40,
    ) -> None:
        super().__init__(optimizer, scheduler)
        require_sizes(layers=layers, heads=heads, width=width, dropout=dropout)
        self.save_hyperparameters(
            dict(pretrained=pretrained, layers=layers, heads=heads, width=width, dropout=dropout), logger=False
        )
        self.cross_entropy = nn.CrossEntropyLoss(ignore_index=IGNORED)
        self.tokenizer = tokenizer
        self.sample_prompt = sample_prompt
        self.sample_tokens = sample_tokens
        names = () if dropout is None else ("resid_pdrop", "embd_pdrop", "attn_pdrop")
        dropouts: dict[str, Any] = dict.fromkeys(names, dropout)
        end: Any = tokenizer.eos_token_id
        if pretrained is None:
            shape = GPT2Config(
                vocab_size=len(tokenizer),
                n_positions=max_length,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                bos_token_id=end,
                eos_token_id=end,
                **dropouts,
            )
            self.model: Any = GPT2LMHeadModel(shape)
        else:
            self.model = load_model(GPT2LMHeadModel, pretrained, **dropouts)
        require_vocabulary(max(tokenizer.get_vocab().values()), self.model.config.vocab_size, pretrained)
        require(
            max_length <= self.model.config.n_positions,
            f"data.block={max_length}: the model {pretrained} has at most {self.model.config.n_positions} tokens. "
            "Give a smaller block.",
        )

    def inference(self, data: Any) -> Inference:
        """Return the model that computes logits, float32[batch, length, vocabulary], from input_ids,
        int64[batch, length].
        """
        shape = self.model.config
        batch = example(shape.vocab_size, min(16, shape.n_positions), "input_ids")
        facts = Facts(LANGUAGE_MODEL, shape.n_positions, end=self.tokenizer.eos_token_id)
        module = Logits(self.model, use_cache=False)
        return Inference(module, batch, changing(["input_ids"]), plain_tokenizer(self.tokenizer), facts)

    def figures(self, batch: Batch) -> Figures:
        return {"loss": next_token_loss(self.model, batch, self.cross_entropy)}

    def tensor_plan(self) -> dict[str, str]:
        """Return the kind of sharding of each layer that `strategy=ort_tensor` shards."""
        return {
            "model.transformer.wte": "embedding",
            "model.transformer.h.*.attn": "gpt2_attention",
            "model.transformer.h.*.mlp.c_fc": "column",
            "model.transformer.h.*.mlp.c_proj": "row",
            "model.lm_head": "output",
            "cross_entropy": "cross_entropy",
        }

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": count_targets(batch)}

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        # Generation needs the logits of all words, of which a process can have a part.
        if self.trainer.sanity_checking or self.sample_tokens < 1 or is_sharded(self):
            return
        text = self.sample(self.sample_prompt, self.sample_tokens, seed=self.trainer.current_epoch)
        for logger in self.loggers:
            writer: Any = getattr(logger, "experiment", None)
            if hasattr(writer, "add_text"):
                writer.add_text("sample", text, self.trainer.global_step)

    @torch.no_grad()
    def sample(self, prompt: str, tokens: int, seed: int = 0) -> str:
        """Return a prompt with a continuation, drawn from the 50 most probable tokens at each position.

        Of a prompt that fills the model's positions, the last tokens are continued.
        The state of torch's random generator doesn't change.
        """
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids.to(self.device)
        if ids.shape[1] == 0:
            ids = torch.tensor([[self.tokenizer.eos_token_id]], device=self.device)
        positions = self.model.config.n_positions
        ids = ids[:, -max(1, positions - 1) :]
        training = self.model.training
        self.model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            text = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(tokens, max(1, positions - ids.shape[1])),
                do_sample=True,
                top_k=50,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        self.model.train(training)
        assert isinstance(text, Tensor)
        return str(self.tokenizer.decode(text[0]))
