"""One tiny base for all of it."""

from __future__ import annotations

import pytest

from medusa.base_model import load_base_model


@pytest.fixture(scope="session")
def base(tiny_base_dir):
    return load_base_model(str(tiny_base_dir))
