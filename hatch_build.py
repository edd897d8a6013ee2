"""Metadata of the package that depends on where it is published: project URLs, and a README whose links work there.

The package index shows the README without the repository around it, so relative links must become absolute ones.
QUIRE_URL is the address of the repository; the release workflow sets it. Without it there are no URLs, and images are
left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?!https?://|#)[^)\s]+)\)")


class QuireMetadata(MetadataHookInterface):
    """Fill in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Change `metadata` in place."""
        url = os.environ.get("QUIRE_URL", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, url)}
        metadata["urls"] = project_urls(url) if url else {}


def with_absolute_links(text: str, url: str) -> str:
    """Return a README whose relative links and images point into the repository at `url`, or are gone without one."""

    def absolute(match: re.Match[str]) -> str:
        image, shown, path = match["image"], match["text"], match["path"]
        if not url:
            return "" if image else shown
        return f"{image}[{shown}]({url}/{'raw' if image else 'blob'}/HEAD/{path})"

    return _LINK.sub(absolute, text)


def project_urls(url: str) -> dict[str, str]:
    """Return the links that the package index shows beside a project."""
    return {
        "Homepage": url,
        "Documentation": f"{url}/tree/HEAD/docs",
        "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
