"""Serves an exported run over HTTP. Requests that arrive together run as one batch.

    PYTHONPATH=tasks python examples/serve/serve.py run=RUN_FOLDER [host=127.0.0.1] [port=8000] [batch=16] [wait_ms=5]
        [queue=256] [max_characters=4000] [max_tokens=100] [threads=N]

POST /predict accepts {"text": ...} and, for a language model, "tokens", "temperature", "top_k" and "seed". GET /health
returns the kind of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, HTTPException
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.prediction.classification import classified
from lit_ort_tasks.prediction.facts import CLASSIFIER, MASKED_MODEL
from lit_ort_tasks.prediction.generation import Sampling, continued
from lit_ort_tasks.prediction.masked import unmasked
from lit_ort_tasks.prediction.model import Model
from pydantic import BaseModel, Field

Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the service.

    Args:
        batch: largest number of texts in one run.
        wait_ms: how long a text waits for others, in milliseconds.
        queue: largest number of waiting texts.
        max_characters: largest length of a text.
        max_tokens: largest number of generated tokens.
    """

    batch: int = 16
    wait_ms: float = 5.0
    queue: int = 256
    max_characters: int = 4000
    max_tokens: int = 100

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= (0 if name == "wait_ms" else 1), f"{name}={value} is too small. Give a larger number.")


class Query(BaseModel):
    """One request. All fields but the text are for language models."""

    text: Annotated[str, Field(min_length=1)]
    tokens: Annotated[int, Field(ge=1)] = 40
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8
    top_k: Annotated[int, Field(ge=1)] | None = 40
    seed: int = 0

    def sampling(self) -> Sampling:
        return Sampling(self.tokens, self.temperature, self.top_k, self.seed)


class Batcher:
    """Collects requests for a short time and runs those with the same sampling as one batch, in a thread."""

    def __init__(self, model: Model, limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._waiting: asyncio.Queue[tuple[Query, asyncio.Future[Any]]] = asyncio.Queue(limits.queue)

    async def answer(self, query: Query) -> Any:
        """Return the answer to a request.

        Raises:
            asyncio.QueueFull: too many requests wait.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((query, future))
        return await future

    async def run(self) -> None:
        """Answers requests until it is canceled."""
        while True:
            group = await self._group()
            batches: dict[Sampling, list[tuple[Query, asyncio.Future[Any]]]] = {}
            for query, future in group:
                batches.setdefault(query.sampling(), []).append((query, future))
            for sampling, members in batches.items():
                texts = [query.text for query, _ in members]
                try:
                    answers: Sequence[Any] = await asyncio.to_thread(predicted, self._model, texts, sampling)
                except InputError as error:
                    answers = [error] * len(members)
                for (_, future), answer in zip(members, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)

    async def _group(self) -> list[tuple[Query, asyncio.Future[Any]]]:
        group = [await self._waiting.get()]
        clock = asyncio.get_running_loop().time
        end = clock() + self._limits.wait_ms / 1000
        with contextlib.suppress(asyncio.TimeoutError):
            while len(group) < self._limits.batch:
                group.append(await asyncio.wait_for(self._waiting.get(), end - clock()))
        return group


def predicted(model: Model, texts: Sequence[str], sampling: Sampling) -> list[dict[str, Any]]:
    """Return an answer for each text, in the form of the model's kind.

    Raises:
        InputError: the model can't process a text.
    """
    if model.facts.kind == CLASSIFIER:
        return [{"label": label, "probability": probability} for label, probability in classified(model, texts)]
    if model.facts.kind == MASKED_MODEL:
        return [{"masks": candidates} for candidates in unmasked(model, texts)]
    *_, continuations = continued(model, texts, sampling)
    return [{"text": continuation} for continuation in continuations]


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
    async def predict(query: Query) -> Any:
        if len(query.text) > limits.max_characters:
            raise HTTPException(
                422, f"text has {len(query.text)} characters, and at most {limits.max_characters} are allowed."
            )
        if query.tokens > limits.max_tokens:
            raise HTTPException(422, f"tokens={query.tokens}, and at most {limits.max_tokens} are allowed.")
        try:
            # Before it joins a batch: a text without tokens would fail the whole batch.
            await asyncio.to_thread(require_tokens, model, query.text)
            answer = await batcher.answer(query)
        except asyncio.QueueFull as error:
            raise HTTPException(503, f"{limits.queue} requests are already waiting. Try again later.") from error
        except InputError as error:
            raise HTTPException(422, str(error)) from error
        if isinstance(answer, InputError):
            raise HTTPException(422, str(answer))
        return answer

    return app


def require_tokens(model: Model, text: str) -> None:
    require(bool(model.encode([text])[0]), f"text={text!r} has no token. Give at least one word.")


def main(arguments: Sequence[str]) -> None:
    import uvicorn

    values = {name: value for name, _, value in (argument.partition("=") for argument in arguments)}
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Limits)}
    names = ("run", "host", "port", "threads", *defaults)
    for name in values:
        require(name in names, f"{name} is not an option. Give NAME=VALUE with one of the names {', '.join(names)}.")
    require("run" in values, "run is missing. Give the folder of an exported run: run=RUN_FOLDER.")
    limits = Limits(**{name: number(values, name, type(defaults[name])) for name in defaults if name in values})
    port = number(values, "port", int) if "port" in values else 8000
    threads = number(values, "threads", int) if "threads" in values else None
    model = Model(Path(values["run"]), threads)
    uvicorn.run(application(model, limits), host=values.get("host", "127.0.0.1"), port=port)


def number(values: Mapping[str, str], name: str, kind: type[Number]) -> Number:
    try:
        return kind(values[name])
    except ValueError as error:
        raise InputError(f"{name}={values[name]} is not a number. Give a number.") from error


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"], ["-h"]):
        print(__doc__)
        sys.exit()
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")
