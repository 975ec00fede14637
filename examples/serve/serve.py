"""Serves an exported run over HTTP, requests that arrive together as one batch.

    PYTHONPATH=. python examples/serve/serve.py run=RUN_FOLDER [host=127.0.0.1] [port=8000] [batch=16] [wait_ms=5]
        [queue=256] [max_characters=4000] [max_tokens=100] [threads=N]

POST /predict takes {"text": ...} and, for a language model, "tokens", "temperature", "top_k" and "seed". GET /health
tells the model's kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.prediction.classification import classified
from lit_ort_tasks.prediction.facts import CLASSIFIER, MASKED_MODEL
from lit_ort_tasks.prediction.generation import Sampling, continued
from lit_ort_tasks.prediction.masked import unmasked
from lit_ort_tasks.prediction.model import Model
from pydantic import BaseModel, Field


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a service takes.

    Args:
        batch: texts of one run.
        wait_ms: how long a text waits for others.
        queue: texts that may wait.
        max_characters: of a text.
        max_tokens: that a text goes on for.
    """

    batch: int = 16
    wait_ms: float = 5.0
    queue: int = 256
    max_characters: int = 4000
    max_tokens: int = 100

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= (0 if name == "wait_ms" else 1), f"{name}={value}: is too small. Give a larger number.")


class Asked(BaseModel):
    """One request; everything but the text is of language models."""

    text: Annotated[str, Field(min_length=1)]
    tokens: Annotated[int, Field(ge=1)] = 40
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8
    top_k: Annotated[int, Field(ge=1)] | None = 40
    seed: int = 0

    def sampling(self) -> Sampling:
        return Sampling(self.tokens, self.temperature, self.top_k, self.seed)


class Batcher:
    """Collects texts that are asked for alike within a moment, and runs them at once beside the event loop."""

    def __init__(self, model: Model, limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._waiting: asyncio.Queue[tuple[Asked, asyncio.Future[Any]]] = asyncio.Queue(limits.queue)

    async def answer(self, asked: Asked) -> Any:
        """Raises asyncio.QueueFull where too many wait."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((asked, future))
        return await future

    async def run(self) -> None:
        """Answers for as long as it isn't cancelled."""
        while True:
            group = await self._group()
            kinds: dict[Sampling, list[tuple[Asked, asyncio.Future[Any]]]] = {}
            for asked, future in group:
                kinds.setdefault(asked.sampling(), []).append((asked, future))
            for sampling, members in kinds.items():
                texts = [asked.text for asked, _ in members]
                try:
                    answers: Sequence[Any] = await asyncio.to_thread(predicted, self._model, texts, sampling)
                except InputError as error:
                    answers = [error] * len(members)
                for (_, future), answer in zip(members, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)

    async def _group(self) -> list[tuple[Asked, asyncio.Future[Any]]]:
        group = [await self._waiting.get()]
        clock = asyncio.get_running_loop().time
        end = clock() + self._limits.wait_ms / 1000
        with contextlib.suppress(asyncio.TimeoutError):
            while len(group) < self._limits.batch:
                group.append(await asyncio.wait_for(self._waiting.get(), end - clock()))
        return group


def predicted(model: Model, texts: Sequence[str], sampling: Sampling) -> list[dict[str, Any]]:
    """An answer for each text, by the model's kind. Raises InputError for a text that the model can't take."""
    if model.facts.kind == CLASSIFIER:
        return [{"label": label, "probability": share} for label, share in classified(model, texts)]
    if model.facts.kind == MASKED_MODEL:
        return [{"masks": places} for places in unmasked(model, texts)]
    *_, found = continued(model, texts, sampling)
    return [{"text": more} for more in found]


def application(model: Model, limits: Limits) -> FastAPI:
    batcher = Batcher(model, limits)

    @contextlib.asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(lifespan=running)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"model": model.facts.kind}

    @app.post("/predict")
    async def predict(asked: Asked) -> Any:
        if len(asked.text) > limits.max_characters:
            raise HTTPException(422, f"text has {len(asked.text)} characters, and at most {limits.max_characters} fit.")
        if asked.tokens > limits.max_tokens:
            raise HTTPException(422, f"tokens={asked.tokens}, and at most {limits.max_tokens} are given.")
        try:
            # Alone first: a text without tokens would fail its whole batch.
            await asyncio.to_thread(require_tokens, model, asked.text)
            answer = await batcher.answer(asked)
        except asyncio.QueueFull as error:
            raise HTTPException(503, f"{limits.queue} requests wait already. Try again in a moment.") from error
        except InputError as error:
            raise HTTPException(422, str(error)) from error
        if isinstance(answer, InputError):
            raise HTTPException(422, str(answer))
        return answer

    return app


def require_tokens(model: Model, text: str) -> None:
    require(bool(model.encode([text])[0]), f"text={text!r}: has no token. Give at least a word.")


def main(arguments: Sequence[str]) -> None:
    import uvicorn

    parts = [argument.partition("=") for argument in arguments]
    given = {name: value for name, _, value in parts}
    numbers: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Limits)}
    known = ("run", "host", "port", "threads", *numbers)
    for name in given:
        require(name in known, f"{name}: is unknown. Give NAME=VALUE with a name of {', '.join(known)}.")
    require("run" in given, "run: is missing. Give the folder of a run that was exported: run=RUN_FOLDER.")
    try:
        limits = Limits(**{name: type(numbers[name])(given[name]) for name in numbers if name in given})
        port, threads = int(given.get("port", "8000")), given.get("threads")
        model = Model(Path(given["run"]), None if threads is None else int(threads))
    except ValueError as error:
        raise InputError(f"{error}. Give a number.") from error
    uvicorn.run(application(model, limits), host=given.get("host", "127.0.0.1"), port=port)


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"], ["-h"]):
        print(__doc__)
        sys.exit()
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")
