"""Check the web pages with axe-core (WCAG 2.2 AA): python tests/axe_page.py AXE.MIN.JS [FOLDER].

Starts servers of the demo model, opens every view at 420 and 1440 pixels in both themes, and prints axe-core's
violations and controls that are smaller than 24 pixels. Screenshots go to FOLDER. The exit code is 1 if anything is
found. axe-core comes from npm (`npm install axe-core`: node_modules/axe-core/axe.min.js).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "server"))

from browser import Browser, browsing
from serving import Server, serving

_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
_AXE = """
    const done = arguments[1];
    axe.run({ runOnly: { type: "tag", values: arguments[0] } }).then((found) => done(found.violations.map((one) =>
        `${one.id} (${one.impact}): ${one.help}\\n` + one.nodes.slice(0, 5).map((node) => `    ${node.html.slice(0, 160)}`).join("\\n"))));
"""
_SMALL = """
    return [...document.querySelectorAll("button, a, input, textarea, summary")]
        .map((element) => [element, element.getBoundingClientRect()])
        .filter(([element, box]) => box.width && element.type !== "checkbox" && !element.closest("p, td"))
        .filter(([element, box]) => box.width < 24 || box.height < 24)
        .map(([element, box]) => `${Math.round(box.width)} x ${Math.round(box.height)} px: ${element.outerHTML.slice(0, 120)}`);
"""
_MARKDOWN = """
    return import("/static/markdown.js").then(({ MarkdownView }) => {
        const box = document.querySelector(".message.assistant .text");
        box.replaceChildren();
        new MarkdownView(box).show(arguments[0]);
    });
"""
_TEXT = (
    "# A heading\n\nText with **bold**, *italic*, `code`, a [link](https://example.org) and\n\n"
    "1. a list\n   - with a list in it\n2. and more\n\n> a quotation\n\n| model | tokens/s |\n|---|--:|\n| nano | 612 |\n"
    "\n```python\nfor prompt in prompts:\n    print(llm.generate(prompt))\n```\n"
)


def _ask(browser: Browser, text: str) -> None:
    browser.type("#prompt", text, chr(0xE007))
    open_answers = "return document.querySelectorAll('.message.streaming').length"
    browser.until(lambda: browser.text(".message.assistant") and not browser.js(open_answers))


def _empty(browser: Browser, server: Server) -> None:
    browser.open(server.url)
    browser.js("document.querySelectorAll('#chat > details').forEach((e) => (e.open = true))")


def _chat(browser: Browser, server: Server) -> None:
    browser.open(server.url)
    _ask(browser, "What is 27 + 45?")
    browser.js(_MARKDOWN, _TEXT)


def _tokens(browser: Browser, server: Server) -> None:
    browser.open(server.url)
    browser.js("document.getElementById('settings').open = true")
    browser.click("[name=logprobs]")
    _ask(browser, "Tell me a story about a rabbit.")
    browser.type(".tokens", chr(0xE014), chr(0xE014))
    browser.type("[name=temperature]", "200")


def _live(browser: Browser, server: Server) -> None:
    browser.open(server.url)
    browser.until(lambda: browser.js("return document.getElementById('model').textContent"))
    for prompt in ("Tell me a story.", "Tell me about a fox."):
        code = "fetch('v1/completions', {method: 'POST', headers: {'content-type': 'application/json'}, body: JSON.stringify({prompt: arguments[0], max_tokens: 1500, ignore_eos: true})})"
        browser.js(code + "; return 1", prompt)
    browser.click("#tab-live")
    browser.until(lambda: browser.js("return document.querySelectorAll('#running tbody tr[data-id]').length"))
    browser.until(lambda: browser.text("#running td:nth-child(7)"))
    browser.js("document.getElementById('terms').open = true")


def _gone(browser: Browser, server: Server) -> None:
    with serving("demo", "--dry-run") as ending:
        browser.open(ending.url + "/#live")
        browser.until(lambda: "Live" in browser.text("#connection"))
        ending.close()
        browser.until(lambda: browser.find("#gone").is_displayed())


def _docs(browser: Browser, server: Server) -> None:
    browser.open(server.url + "/docs")
    browser.until(lambda: browser.js("return document.querySelectorAll('.operation').length"))
    browser.js("document.querySelectorAll('.operation:first-child details').forEach((e) => (e.open = true))")


_VIEWS: dict[str, Callable[[Browser, Server], None]] = {
    "empty": _empty,
    "chat": _chat,
    "tokens": _tokens,
    "live": _live,
    "gone": _gone,
    "docs": _docs,
}


def check(browser: Browser, server: Server, axe: str, folder: Path | None) -> Iterator[str]:
    """Yield what is wrong in each view, size and theme."""
    for view, arrange in _VIEWS.items():
        for width, height in ((420, 900), (1440, 900)):
            browser.resize(width, height)
            browser.driver.get(server.url + "/version")
            browser.js("localStorage.clear()")
            arrange(browser, server)
            for theme in ("light", "dark"):
                browser.prefer(theme)
                name = f"{view}-{width}-{theme}"
                if folder:
                    browser.driver.save_screenshot(str(folder / f"{name}.png"))
                browser.js(axe)
                wrong = browser.driver.execute_async_script(_AXE, _TAGS) + browser.js(_SMALL)
                print(f"{name}: {len(wrong)} found", flush=True)
                yield from (f"{name}: {one}" for one in wrong)


def main() -> int:
    """Print everything found and return the exit code."""
    axe = Path(sys.argv[1]).read_text()
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as profile,
        serving("demo", "--dtype", "float32") as server,
        browsing(Path(profile)) as browser,
    ):
        browser.driver.set_script_timeout(120)
        found = list(check(browser, server, axe, folder))
    print("\n".join(found) or "axe-core found no violations, and no control is smaller than 24 pixels.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
