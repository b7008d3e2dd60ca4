"""Values as one line of JSON, five times as fast as ``json`` makes it: a tuning writes hundreds of them between its replays.

Knows values; nothing of what they mean.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import to_json


def json_bytes(values: Any) -> bytes:
    """Compact JSON in UTF-8, without a line end. Numbers that are none are NaN and Infinity, as ``json`` writes them."""
    try:
        return to_json(values, fallback=str)
    except ValueError:  # a lone surrogate, as in a file name that is no text
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=str).encode("utf-8", "replace")
