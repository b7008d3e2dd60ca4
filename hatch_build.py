"""The project page of a package index: README.md without links and pictures of files, which lead
nowhere outside the repository.

hatchling calls it when the wheel or the sdist is built; see [tool.hatch.metadata.hooks.custom] in
pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_HERE = r"(?!https?:|mailto:|#)"
"""No address, and no heading of the page itself."""
_PICTURE = re.compile(
    rf"!\[[^\]]*\]\({_HERE}[^)]*\)|<(?:img|source)\b[^>]*\bsrc(?:set)?=\"{_HERE}[^>]*>"
)
_LINK = re.compile(rf"\[([^\]]*)\]\({_HERE}[^)]*\)")


class ReadmeHook(MetadataHookInterface):
    """Sets the field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called once for a build, with the table [project]."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_paths(text)}


def without_paths(text: str) -> str:
    """The text of relative links without the links; no relative pictures. Code stays as it is."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if part.startswith("```") else _LINK.sub(r"\1", _PICTURE.sub("", part))
        for part in parts
    )
