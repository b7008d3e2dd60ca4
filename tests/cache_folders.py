"""Observations of a cache directory for tests: the warnings of a call, and the files that it left."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def warned(*words: str) -> Iterator[None]:
    """Exactly one warning for each of the words, in this order, with the word in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert len(caught) == len(words), [str(each.message) for each in caught]
    for each, word in zip(caught, words, strict=True):
        assert each.category is UserWarning
        assert word in str(each.message)


def files(folder: Path) -> list[str]:
    """All but the locks."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
