"""The snippets of the README's serving section, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from serving import Server

README = Path(__file__).resolve().parents[2] / "README.md"


def snippets(language: str) -> list[str]:
    section = README.read_text().split("## Serve it")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def test_curl(demo: Server) -> None:
    for snippet in snippets("bash"):
        command = snippet.replace("http://localhost:8000", demo.url).replace("curl ", "curl -s ", 1)
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert "27 + 45 = 72" in found.stdout, found
        assert ("terms_ms" in found.stdout) == ("receipt" in snippet), found


def test_snippet_of_embeddings(demo: Server) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (README.parent / "docs" / "APIS.md").read_text(), re.DOTALL)
    code = code.replace("http://localhost:8000", demo.url)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout == "2 384\n", found


def test_python(demo: Server) -> None:
    assert snippets("python")
    for snippet in snippets("python"):
        code = snippet.replace("http://localhost:8000", demo.url)
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        wanted = 'get_weather {"city": "Oakford"}\n' if "tools=" in snippet else "27 + 45 = 72"
        assert found.stdout == wanted, found
