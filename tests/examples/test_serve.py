"""The example service with an exported model: batches, limits, and what it refuses."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.prediction.facts import CLASSIFIER, MASKED_MODEL
from lit_ort_tasks.prediction.model import Model

from examples.serve import serve
from examples.serve.serve import Limits, application, main
from tests.tasks.exported import PAIRS

pytestmark = pytest.mark.xdist_group("prediction")


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_texts_that_arrive_together_are_one_batch(
    trained: tuple[Path, object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    predicted = serve.predicted

    def counted(model: Model, texts: list[str], *others: object) -> object:
        sizes.append(len(texts))
        return predicted(model, texts, *others)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(serve, "predicted", counted)
    requests = [{"text": text, "tokens": 3, "temperature": 0} for text in ("the list", "it has", "sorted ?")] * 2
    with TestClient(application(Model(trained[0]), Limits(batch=4, wait_ms=200))) as client:
        alone = [client.post("/predict", json=one).json()["text"] for one in requests[:3]]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda one: client.post("/predict", json=one).json()["text"], requests))
    assert answers == alone * 2
    assert sizes[:3] == [1, 1, 1]
    assert sum(sizes[3:]) == 6
    assert max(sizes) <= 4
    assert len(sizes) < 9


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_classes_and_masks(berts: dict[str, Path]) -> None:
    with TestClient(application(Model(berts[CLASSIFIER]), Limits())) as client:
        assert client.get("/health").json() == {"model": "classifier"}
        answer = client.post("/predict", json={"text": "the list"}).json()
        assert answer["label"] in ("short", "long")
        assert 0.5 <= answer["probability"] <= 1
    with TestClient(application(Model(berts[MASKED_MODEL]), Limits())) as client:
        assert len(client.post("/predict", json={"text": "the [MASK]"}).json()["masks"][0]) == 5
        response = client.post("/predict", json={"text": "the list"})
        assert response.status_code == 422
        assert "has no [MASK] to fill" in response.json()["detail"]
    with TestClient(application(Model(berts[PAIRS]), Limits())) as client:
        answer = client.post("/predict", json={"text": "the list", "pair": "is empty"}).json()
        assert answer["label"] in ("short", "long")
        assert "classifier of pairs" in client.post("/predict", json={"text": "the list"}).json()["detail"]


def test_a_request_without_a_mask_fails_no_other_one(berts: dict[str, Path]) -> None:
    with (
        TestClient(application(Model(berts[MASKED_MODEL]), Limits(wait_ms=300))) as client,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        texts = ({"text": "the list"}, {"text": "the [MASK]"})
        answers = list(pool.map(lambda one: client.post("/predict", json=one).status_code, texts))
    assert answers == [422, 200]


def test_an_error_of_a_batch_ends_it_alone(
    trained: tuple[Path, object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    predicted = serve.predicted
    with TestClient(application(Model(trained[0]), Limits()), raise_server_exceptions=False) as client:
        monkeypatch.setattr(serve, "predicted", fails)
        assert client.post("/predict", json={"text": "the"}).status_code == 500
        monkeypatch.setattr(serve, "predicted", predicted)
        assert client.post("/predict", json={"text": "the", "tokens": 1, "temperature": 1e-310}).status_code == 200


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"text": "x" * 60}, "text has 60 characters, and at most 50 are allowed."),
        ({"text": "a", "tokens": 9}, "tokens=9, and at most 5 are allowed."),
        ({"text": "  ", "tokens": 1}, "has no token"),
        ({"text": ""}, "at least 1 character"),
        ({"text": "the", "pair": "it", "tokens": 1}, "pair='it': the model is a language model"),
        ({"text": "a", "seed": -1}, "greater than or equal to 0"),
        ({"text": "a", "temperature": -1}, "greater than or equal to 0"),
        ({}, "Field required"),
    ],
)
def test_what_is_refused(trained: tuple[Path, object, object], query: dict[str, object], message: str) -> None:
    with TestClient(application(Model(trained[0]), Limits(max_characters=50, max_tokens=5))) as client:
        response = client.post("/predict", json=query)
        assert response.status_code == 422
        assert message in response.text
        assert client.post("/predict", json={"text": "the", "tokens": 1}).status_code == 200


def test_a_full_queue_is_refused(trained: tuple[Path, object, object], monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(model: Model, texts: list[str], *others: object) -> list[dict[str, str]]:
        entered.set()
        leave.wait(30)
        return [{"text": ""}] * len(texts)

    monkeypatch.setattr(serve, "predicted", slow)
    with (
        TestClient(application(Model(trained[0]), Limits(queue=1, batch=1))) as client,
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        first = pool.submit(client.post, "/predict", json={"text": "the"})
        entered.wait(30)
        others = [pool.submit(client.post, "/predict", json={"text": "the"}) for _ in range(2)]
        done, _ = concurrent.futures.wait(others, 30, concurrent.futures.FIRST_COMPLETED)
        response = next(iter(done)).result()
        leave.set()
        assert response.status_code == 503
        assert "1 requests are already waiting" in response.json()["detail"]
        assert sorted(one.result().status_code for one in [first, *others]) == [200, 200, 503]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["port=1"], "run is missing"),
        (["run=none", "size=3"], "size is not an option. Give NAME=VALUE with one of the names run, host"),
        (["run=none", "batch=0"], "batch=0 is too small"),
        (["run=none", "batch=many"], "batch=many is not a number. Give a number."),
        (["run=none", "port=http"], "port=http is not a number"),
        (
            ["run=none"],
            r"none/model.onnx: there is no such file. Give the folder of a run of `lit-ort train export=onnx`.$",
        ),
    ],
)
def test_the_command_line(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        main(arguments)
