"""An exported model of a run: its session, its tokenizer, and what was written down about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.prediction.facts import MODEL, TOKENIZER, Facts, digest_of


class Model:
    """A folder with a model and its tokenizer, loaded.

    Args:
        folder: of a run that ended with `export=onnx`.
        threads: of the session; None takes ONNX Runtime's number.

    Raises:
        InputError: a file is missing or unusable, or the tokenizer's vocabulary was changed.
    """

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        path, words = folder / MODEL, folder / TOKENIZER
        for file in (path, words):
            require(
                file.is_file(),
                f"{file}: there is no such file. Export the run: python train.py export=onnx, or give its folder.",
            )
        options = onnxruntime.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        # ONNX Runtime's errors have no base of their own but Exception.
        except Exception as error:
            raise InputError(f"{path}: is no ONNX model that can be loaded: {error}. Export the run again.") from error
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(words))
        # So do those of tokenizers.
        except Exception as error:
            raise InputError(f"{words}: is no tokenizer: {error}. Export the run again.") from error
        facts = self._session.get_modelmeta().custom_metadata_map.get("facts")
        if facts is None:
            raise InputError(f"{path}: tells no task. Give a folder that python train.py export=onnx wrote to.")
        self.facts = Facts.from_text(facts)
        found = digest_of(self.tokenizer.get_vocab())
        require(
            found == self.facts.vocabulary,
            f"{words}: its vocabulary is {found}, and that of the exported model {self.facts.vocabulary}. Put the "
            "tokenizer of the run back, or export the run again.",
        )
        self._inputs = [value.name for value in self._session.get_inputs()]

    def run(self, given: Mapping[str, np.ndarray]) -> np.ndarray:
        """The first result, for those of the inputs that the model takes."""
        (result, *_) = self._session.run(None, {name: given[name] for name in self._inputs})
        return np.asarray(result)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]
