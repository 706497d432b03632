from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "openai"):
    pytest.importorskip(_name)

from serving import served_model, serving  # noqa: E402


@pytest.fixture(scope="session")
def model() -> Any:
    return served_model()


@pytest.fixture(scope="session")
def served(model: Any) -> Iterator[Any]:
    """One server for all tests that leave it as it was."""
    with serving(model) as served:
        yield served


@pytest.fixture
def client(served: Any) -> Iterator[Any]:
    with served.openai() as client:
        yield client


@pytest.fixture
def http(served: Any) -> Iterator[Any]:
    with served.http() as client:
        yield client
