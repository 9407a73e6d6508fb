"""The OpenAPI document of the admin address is true, with an admin key and without."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from schemathesis import Case
from starlette.types import ASGIApp

from semel.core import Modality
from semel.interchange.safetensors import write
from semel.telemetry import Meter
from semel.worker.admin import admin_document, create_admin_app
from tests.frontend.conformance import POSITIVE, Served, served
from tests.worker.stored import Store, digest_of, image

KEY = "an-operator-s-key-0123456789"
BEARER = {"Authorization": f"Bearer {KEY}"}
INJECT = "POST /v1/mm_cache/inject"
OPERATIONS = sorted(f"{method.upper()} {path}" for path, told in admin_document()["paths"].items() for method in told)
OPEN = {"GET /health", "GET /metrics", "GET /ready"}
JSON = "application/json"


@asynccontextmanager
async def admin(key: str | None) -> AsyncIterator[ASGIApp]:
    store = Store()

    def count(modality: Modality, hit: bool) -> None:
        pass

    yield create_admin_app(store, Meter(), key=key, count=count, reset=store.reset, max_body_bytes=1 << 20)


@pytest.mark.parametrize(
    ("key", "headers", "refusal"), [(KEY, BEARER, None), (KEY, {"Authorization": ""}, 401), (None, BEARER, 403)]
)
def test_every_answer_is_in_the_document(key: str | None, headers: Mapping[str, str], refusal: int | None) -> None:
    with served(lambda: admin(key)) as made:
        for label in OPERATIONS:
            made.examine(label, POSITIVE, count=3, headers=headers)
    for label, status, _ in made.answers:
        expected = 400 if label == INJECT else 200  # what is made up is no file
        assert status == (expected if refusal is None or label in OPEN else refusal)
    assert {label for label, _, _ in made.answers} == set(OPERATIONS)


def test_what_is_injected_is_answered_as_the_document_says() -> None:
    def file(case: Case[Any]) -> None:
        case.body = b"".join(bytes(piece) for piece in write({digest_of(1): image(3)}))

    def answered(made: Served, status: int) -> int:
        return made.answers[INJECT, status, JSON]

    with served(lambda: admin(KEY)) as made:
        made.examine(INJECT, POSITIVE, count=3, headers=BEARER, change=file)
        assert answered(made, 200) == made.answers.total() > 0
        made.examine(INJECT, POSITIVE, count=5, headers=BEARER)
        assert answered(made, 400) > 0
        made.examine(INJECT, POSITIVE, count=1, headers={**BEARER, "Content-Type": "text/plain"})
        assert answered(made, 415) == 1
