"""Serves an exported run over HTTP. Requests that arrive together run as one batch.

    PYTHONPATH=tasks python examples/serve/serve.py run=RUN_FOLDER [host=127.0.0.1] [port=8000] [batch=16] [wait_ms=5]
        [queue=256] [max_characters=4000] [max_tokens=100] [threads=N]

POST /predict accepts {"text": ...}, for a classifier of pairs of texts also "pair", and for a language model "tokens",
"temperature", "top_k" and "seed". GET /health returns the kind of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, HTTPException
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.prediction.classification import Text, classified, require_form
from lit_ort_tasks.prediction.facts import CLASSIFIER, MASKED_MODEL
from lit_ort_tasks.prediction.generation import Sampling, continued
from lit_ort_tasks.prediction.masked import require_masks, unmasked
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
    """One request: a text, for a classifier of pairs a second one, and for language models the other fields."""

    text: Annotated[str, Field(min_length=1)]
    pair: Annotated[str, Field(min_length=1)] | None = None
    tokens: Annotated[int, Field(ge=1)] = 40
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8
    top_k: Annotated[int, Field(ge=1)] | None = 40
    seed: Annotated[int, Field(ge=0)] = 0

    def parts(self) -> dict[str, str]:
        """The texts by the names of their fields."""
        return {"text": self.text} if self.pair is None else {"text": self.text, "pair": self.pair}

    def content(self) -> Text:
        return self.text if self.pair is None else (self.text, self.pair)

    def sampling(self) -> Sampling:
        return Sampling(self.tokens, self.temperature, self.top_k, self.seed)


@dataclasses.dataclass(frozen=True)
class Request:
    """A request that waits for its batch, and the future of its answer."""

    content: Text
    sampling: Sampling
    answer: asyncio.Future[Any]


class Batcher:
    """Collects requests for a short time and runs those with the same sampling as one batch, in a thread."""

    def __init__(self, model: Model, limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._waiting: asyncio.Queue[Request] = asyncio.Queue(limits.queue)

    async def answer(self, query: Query) -> Any:
        """Return the answer to a request.

        Raises:
            asyncio.QueueFull: too many requests wait.
            Exception: that of its batch.
        """
        request = Request(query.content(), query.sampling(), asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(request)
        return await request.answer

    async def run(self) -> None:
        """Answers requests until it is canceled."""
        while True:
            batches: dict[Sampling, list[Request]] = {}
            for request in await self._group():
                batches.setdefault(request.sampling, []).append(request)
            for sampling, members in batches.items():
                await self._answer_batch(sampling, members)

    async def _answer_batch(self, sampling: Sampling, members: Sequence[Request]) -> None:
        contents = [request.content for request in members]
        # Of whatever class: an error is the answer to this batch, and others follow.
        (outcome,) = await asyncio.gather(
            asyncio.to_thread(predicted, self._model, contents, sampling), return_exceptions=True
        )
        for number, request in enumerate(members):
            if request.answer.done():  # its client is gone
                continue
            if isinstance(outcome, BaseException):
                request.answer.set_exception(outcome)
            else:
                request.answer.set_result(outcome[number])

    async def _group(self) -> list[Request]:
        group = [await self._waiting.get()]
        clock = asyncio.get_running_loop().time
        end = clock() + self._limits.wait_ms / 1000
        with contextlib.suppress(asyncio.TimeoutError):
            while len(group) < self._limits.batch:
                group.append(await asyncio.wait_for(self._waiting.get(), end - clock()))
        return group


def predicted(model: Model, contents: Sequence[Text], sampling: Sampling) -> list[dict[str, Any]]:
    """Return an answer for each text or pair of texts, in the form of the model's kind.

    Raises:
        InputError: the model can't process a text.
    """
    if model.facts.kind == CLASSIFIER:
        return [{"label": label, "probability": probability} for label, probability in classified(model, contents)]
    texts = [content for content in contents if isinstance(content, str)]  # as require_usable() has checked
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
        for name, text in query.parts().items():
            if len(text) > limits.max_characters:
                detail = f"{name} has {len(text)} characters, and at most {limits.max_characters} are allowed."
                raise HTTPException(422, detail)
        if query.tokens > limits.max_tokens:
            raise HTTPException(422, f"tokens={query.tokens}, and at most {limits.max_tokens} are allowed.")
        try:
            # Before it joins a batch, which it would fail as a whole.
            await asyncio.to_thread(require_usable, model, query)
            return await batcher.answer(query)
        except asyncio.QueueFull as error:
            raise HTTPException(503, f"{limits.queue} requests are already waiting. Try again later.") from error
        except InputError as error:
            raise HTTPException(422, str(error)) from error

    return app


def require_usable(model: Model, query: Query) -> None:
    """Refuses what the model can't process: a text without tokens or masks, or with or without a second one.

    Raises:
        InputError: the text is one of these.
    """
    for name, text in query.parts().items():
        require(bool(model.encode([text])[0]), f"{name}={text!r} has no token. Give at least one word.")
    require_form(model, query.content())
    if model.facts.kind == MASKED_MODEL:
        require_masks(model, query.text)


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
    model = Model(Path(os.path.expanduser(values["run"])), threads)
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
