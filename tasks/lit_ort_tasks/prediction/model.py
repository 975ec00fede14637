"""An exported model of a run: its session, its tokenizer and its description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from lit_ort_tasks.commands.program import command_line
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.prediction.facts import MODEL, TOKENIZER, Facts, digest_of


class Model:
    """A loaded model and its tokenizer.

    Args:
        folder: of a run with `export=onnx`.
        threads: of the session; None for ONNX Runtime's default.

    Raises:
        InputError: a file is missing or unusable, or the tokenizer's vocabulary was changed.
    """

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        path, words = folder / MODEL, folder / TOKENIZER
        export = f"{command_line('train')} export=onnx"
        for file in (path, words):
            require(file.is_file(), f"{file}: there is no such file. Give the folder of a run of `{export}`.")
        options = onnxruntime.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        # ONNX Runtime's errors have no common base but Exception.
        except Exception as error:
            raise InputError(f"{path}: is no ONNX model that can be loaded: {error}. Export the run again.") from error
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(words))
        # Those of tokenizers are plain Exceptions.
        except Exception as error:
            raise InputError(f"{words}: is no tokenizer: {error}. Export the run again.") from error
        facts = self._session.get_modelmeta().custom_metadata_map.get("facts")
        if facts is None:
            raise InputError(f"{path}: has no description of a task. Give the folder of a run of `{export}`.")
        self.facts = Facts.from_text(facts)
        digest = digest_of(self.tokenizer.get_vocab())
        require(
            digest == self.facts.vocabulary,
            f"{words}: its vocabulary is {digest}, and that of the exported model {self.facts.vocabulary}. Put the "
            "tokenizer of the run back, or export the run again.",
        )
        self._inputs = [value.name for value in self._session.get_inputs()]

    @cached_property
    def bounded(self) -> Tokenizer:
        """A copy of the tokenizer that cuts to the model's longest sequence and fills up to the longest text of a call.

        `tokenizer` itself does not change: other threads can be encoding with it.
        """
        bounded: Tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        bounded.enable_truncation(self.facts.max_length)
        bounded.enable_padding(pad_id=bounded.token_to_id("[PAD]") or 0, pad_token="[PAD]")
        return bounded

    def run(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the first output. Inputs that the model doesn't have are ignored."""
        (result, *_) = self._session.run(None, {name: inputs[name] for name in self._inputs})
        return np.asarray(result)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]
