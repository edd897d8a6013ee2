"""The documentation site: its pages, figures and links."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
IDEAS = sorted(path for path in (DOCS / "ideas").glob("*.md") if path.stem != "index")


def pages(entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        for target in entry.values():
            if isinstance(target, list):
                yield from pages(target)
            else:
                yield target


def test_every_page_is_in_the_navigation() -> None:
    navigation = list(pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert sorted(navigation) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_figures_are_as_drawn() -> None:
    path = ROOT / "tools" / "draw_ideas.py"
    spec = importlib.util.spec_from_file_location("draw_ideas", path)
    assert spec is not None and spec.loader is not None
    drawer = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = drawer
    spec.loader.exec_module(drawer)
    drawn = {f"{name}.svg": figure.svg() for name, figure in drawer.FIGURES.items()}
    assert {path.name: path.read_text() for path in (DOCS / "images" / "ideas").iterdir()} == drawn
    assert {path.stem for path in IDEAS} == set(drawer.FIGURES)


@pytest.mark.parametrize("path", IDEAS, ids=lambda path: path.stem)
def test_an_idea_has_all_parts_and_the_gain_of_its_rung(path: Path) -> None:
    text, ladder = path.read_text(), (DOCS / "LADDER.md").read_text()
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert headings == ["The idea", "In the code", "What it buys", "Further reading"]
    assert (
        f"../images/ideas/{path.stem}.svg" in text
        and f"({path.name})" in (DOCS / "ideas/index.md").read_text()
    )
    gains = re.findall(r"[\d.]+x in (?:output rate|time to first token|P99 inter-token latency)", text)
    assert gains or path.stem in (
        "naive",
        "tensor-parallelism",
        "persistent-kernel",
    )  # no rungs of the ladder
    for gain in gains:
        assert gain in ladder, gain


def test_the_site_builds_and_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="zensical builds the site")
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")

    def build() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    built = build()
    assert built.returncode == 0, built.stdout + built.stderr
    site = tmp_path / "site"
    assert "max_tokens" in (site / "python-api" / "index.html").read_text()
    assert (site / "search.json").exists()
    loaded = {
        url
        for page in site.rglob("*.html")
        for url in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)', page.read_text())
    }
    assert not loaded, "pages load nothing from other hosts"
    with (tmp_path / "docs" / "FAQ.md").open("a") as file:
        file.write("\n[nowhere](NOWHERE.md)\n")
    assert build().returncode != 0
