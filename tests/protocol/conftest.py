"""The end of each test."""

from collections.abc import Generator

import pytest

from tests.protocol import in_memory


@pytest.fixture(autouse=True)
def _ranks_end() -> Generator[None]:
    yield
    while in_memory.living:  # or the end of the process would wait for their peers
        in_memory.living.pop().close()
