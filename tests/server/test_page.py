"""The web page in a real browser: playground, live view, keyboard, themes, narrow windows, and an empty console."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from browser import Browser, browsing
from serving import Server, serving

LEFT, RIGHT, UP, DOWN, ENTER, ESCAPE, TAB = (
    chr(c) for c in (0xE012, 0xE014, 0xE013, 0xE015, 0xE007, 0xE00C, 0xE004)
)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


FORGET = """
    return (async () => {
        localStorage.clear();
        sessionStorage.clear();
        const { openStore } = await import("/static/store.js");
        const store = await openStore();
        for (const { id } of await store.all()) await store.delete(id);
    })().catch(() => {});  // a page without storage, such as about:blank
"""


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """Return the window in its initial state, and check after the test that the console is empty."""
    window.driver.get("about:blank")  # the page of a stopped server may still be open and report errors
    window.complaints()
    window.resize(1440, 900)
    window.prefer("light")
    yield window
    assert window.complaints() == []
    window.js(FORGET)


def ask(browser: Browser, text: str) -> None:
    browser.type("#prompt", text, ENTER)


def answered(browser: Browser, count: int = 1) -> str:
    """Wait until `count` answers are complete and return the text of the last one."""
    done = "return document.querySelectorAll('.message.assistant:not(.streaming)').length"
    browser.until(lambda: browser.js(done) == count)
    return browser.js("return [...document.querySelectorAll('.message.assistant .text')].at(-1).textContent")


class Load:
    """Streams that keep a server busy until closed."""

    def __init__(self, server: Server, count: int, make: Callable[[int], dict]) -> None:
        self._stop = Event()
        self._threads = [Thread(target=self._run, args=(server.url, make(i))) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, body: dict) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not self._stop.is_set():
                with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                    for _ in response.iter_lines():
                        if self._stop.is_set():
                            return

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


# -------------------------------------------------------------------------------------- playground


def test_a_chat(demo: Server, browser: Browser) -> None:
    browser.open(demo.url)
    assert browser.driver.title == "Quire"
    browser.until(lambda: "demo" in browser.text("#model"))
    browser.type("[name=temperature]", "0")
    ask(browser, "What is 27 + 45?")
    assert answered(browser) == "27 + 45 = 72"
    measures = browser.text(".measures")
    assert "to first token" in measures and "tokens/s" in measures and "cached" in measures
    browser.until(lambda: "decode" in browser.text(".receipt"))
    assert "Warning" not in browser.text(".message.assistant")
    ask(browser, "What is 3 + 4?")  # the conversation continues
    assert "7" in answered(browser, 2)
    assert browser.js("return document.querySelectorAll('.message').length") == 4
    assert browser.text("#announce").startswith("Answer complete")
    browser.click(".message.assistant .actions button")
    browser.until(lambda: browser.text(".message.assistant .actions button") == "Copied")
    browser.click("#new")
    assert browser.js("return document.querySelectorAll('.message').length") == 0


def test_a_new_conversation_while_an_answer_comes_knows_nothing_of_it(browser: Browser) -> None:
    with serving("demo", "--dry-run", "--dry-run-step-ms", "10") as server:
        browser.open(server.url)
        ask(browser, "secret " * 200)
        browser.until(lambda: "tokens/s" in browser.text(".measures"))
        browser.click("#new")
        browser.until(lambda: browser.find("#send").is_displayed())
        ask(browser, "Hello")
        assert "Hello" in answered(browser) and "secret" not in answered(browser)


def test_stop_by_button_and_by_key(browser: Browser) -> None:
    with serving("demo", "--dry-run", "--dry-run-step-ms", "20") as server:
        browser.open(server.url)
        browser.click("[name=kind][value=text]")
        for stop in (lambda: browser.click("#stop"), lambda: browser.type("#prompt", ESCAPE)):
            ask(browser, "word " * 400)
            browser.until(lambda: "tokens/s" in browser.text(".message.assistant:last-child .measures"))
            stop()
            browser.until(lambda: browser.find("#send").is_displayed())
            assert "stopped by you" in browser.text(".message.assistant:last-child .measures")
            server.wait_until_idle()
        assert server.stats()["requests"]["aborted"] == 2


def test_an_answer_by_schema(demo: Server, browser: Browser) -> None:
    browser.open(demo.url)
    schema = '{"type": "object", "properties": {"age": {"enum": [41]}}, "required": ["age"], "additionalProperties": false}'
    browser.type("[name=schema]", schema[:-1])
    assert "not valid JSON" in browser.text("#blocked")
    browser.type("[name=schema]", "}")
    assert browser.text("#blocked") == ""
    ask(browser, "How old is Rosa?")
    assert answered(browser).replace(" ", "") == '{"age":41}'


def test_what_a_model_writes_is_text(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    browser.click("[name=kind][value=text]")
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    ask(browser, hostile)
    assert "onerror" in answered(browser)
    assert browser.js("return document.querySelectorAll('.message img, .message script').length") == 0


def test_errors_are_shown(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    browser.type("[name=schema]", '{"type": "object", "propertyNames": 5}')
    ask(browser, "Hello")
    browser.until(lambda: browser.text(".problem"))
    assert len(browser.text(".problem")) > 10
    assert [line for line in browser.complaints() if "400" not in line] == []  # the browser logs the status


def test_a_conversation_may_fill_the_context(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    browser.js("document.getElementById('prompt').value = 'a b '.repeat(900)")  # 1,809 tokens of 2,048
    browser.click("#send")
    assert answered(browser) and not browser.text(".problem")


def test_parameters_are_kept_and_copied(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    browser.type("[name=top_k]", "40")
    browser.open(dry.url + "/?again")
    assert browser.find("[name=top_k]").get_property("value") == "40"
    code = "return import('/static/parameters.js').then((m) => m.asCurl({path: 'v1/x', body: {a: \"it's\"}}))"
    assert browser.js(code).endswith("-d '{\"a\":\"it'\\''s\"}'")


def test_wrong_parameters_block_sending(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    for name, text, reason in (
        ("temperature", "200", "Temperature must be between 0 and 100, got 200."),
        ("top_p", "0", "Top p must be above 0 and at most 1, got 0."),
        ("max_tokens", "1.5", "Max tokens must be a whole number, got 1.5."),
        ("seed", "1e", "Seed must be a number."),
        ("schema", "[1]", "JSON schema must be an object, { ... }."),
    ):
        browser.type(f"[name={name}]", text)
        assert browser.text("#blocked") == f"Not sent: {reason}"
        assert browser.text(f"#wrong-{name}") == reason
        ask(browser, "Hello")
        assert browser.js("return document.activeElement.name") == name  # the field that is wrong
        assert browser.js("return document.querySelectorAll('.message').length") == 0
        assert browser.find("#prompt").get_property("value") == "Hello"  # kept
        browser.js("document.getElementById('prompt').value = ''")
        browser.click("#defaults")
        assert browser.text("#blocked") == "" and browser.find(f"[name={name}]").get_property("value") == ""
    assert browser.find("[name=temperature]").get_property("placeholder") == "1"  # the default


def test_the_limits_of_parameters_are_those_of_the_server(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    fields = dry.http.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
    shown = browser.js(
        "return [...document.querySelectorAll('#parameters input[type=number]')]"
        ".map((e) => [e.name, Number(e.min), Number(e.max), e.dataset.above !== undefined])"
    )
    assert len(shown) == 9
    for name, low, high, above in shown:
        limits = fields[name]["anyOf"][0]
        if name == "seed":  # numbers of JavaScript are exact up to 2**53
            assert limits["minimum"] <= low and limits["maximum"] >= high == 2**53 - 1
        else:
            assert (low, high) == (limits["exclusiveMinimum" if above else "minimum"], limits["maximum"]), (
                name
            )


def test_conversations_are_kept(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    ask(browser, "First question")
    answered(browser)
    browser.click("#new")
    ask(browser, "Second question")
    answered(browser)
    titles = "return [...document.querySelectorAll('#conversations .open')].map((e) => e.textContent)"
    browser.until(lambda: browser.js(titles) == ["Second question", "First question"])
    browser.open(dry.url + "/?again")
    browser.until(lambda: browser.js(titles) == ["Second question", "First question"])
    browser.click("#conversations li:nth-child(2) .open")
    assert "First question" in browser.text(".message.user") and browser.text("#title") == "First question"
    assert "First question" in answered(browser)
    browser.click("#conversations [aria-label^=Rename][aria-label*=First]")
    browser.driver.switch_to.active_element.send_keys("Renamed", ENTER)
    browser.until(lambda: browser.js(titles) == ["Second question", "Renamed"])
    assert browser.text("#title") == "Renamed"
    browser.click("#conversations [aria-label^=Delete][aria-label*=Renamed]")
    browser.until(lambda: browser.js(titles) == ["Second question"])
    assert browser.js("return document.querySelectorAll('.message').length") == 0
    browser.click("#undo")
    browser.until(lambda: browser.js(titles) == ["Second question", "Renamed"])


def test_export_and_import(dry: Server, browser: Browser, tmp_path: Path) -> None:
    browser.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    browser.open(dry.url)
    ask(browser, "A question <b>to keep</b>")
    answered(browser)
    browser.click("#export")
    browser.until(lambda: list(tmp_path.glob("quire-conversations-*.json")))
    (file,) = tmp_path.glob("quire-conversations-*.json")
    assert (
        json.loads(file.read_text())["conversations"][0]["messages"][0]["content"]
        == "A question <b>to keep</b>"
    )
    browser.click("#conversations [aria-label^=Delete]")
    browser.until(lambda: not browser.text("#conversations"))
    browser.type("#import-file", str(file))
    browser.until(lambda: browser.text("#library-state") == "Imported 1 conversation.")
    browser.click("#conversations .open")
    assert browser.text(".message.user .text") == "A question <b>to keep</b>"
    wrong = tmp_path / "wrong.json"
    for text, reason in (
        ("{", "is not JSON"),
        ("{}", "is not an export of this page"),
        (file.read_text().replace('"user"', '"root"'), 'message 1: "role" must be'),
    ):
        wrong.write_text(text)
        browser.type("#import-file", str(wrong))
        browser.until(lambda reason=reason: reason in browser.text("#library-state"))
    assert browser.js("return document.querySelectorAll('#conversations li').length") == 1


def test_edit_and_regenerate(demo: Server, browser: Browser) -> None:
    browser.open(demo.url)
    browser.type("[name=temperature]", "0")
    ask(browser, "What is 27 + 45?")
    answered(browser)
    ask(browser, "What is 3 + 4?")
    answered(browser, 2)
    press(browser, "Regenerate", 1)
    browser.until(lambda: browser.js("return document.querySelectorAll('.message.streaming').length") == 0)
    assert "7" in answered(browser, 2)
    press(browser, "Edit", 0)
    browser.js("document.querySelector('.edit textarea').value = 'What is 5 + 6?'")
    browser.type(".edit textarea", ENTER)
    browser.until(lambda: browser.js("return document.querySelectorAll('.message').length") == 2)
    assert answered(browser) == "5 + 6 = 11"


def press(browser: Browser, label: str, index: int) -> None:
    """Click button number `index` of those with this label."""
    code = "return [...document.querySelectorAll('#messages button')].filter((e) => e.textContent === arguments[0])[arguments[1]]"
    browser.until(lambda: browser.js(code, label, index)).click()


def test_log_probabilities(demo: Server, browser: Browser) -> None:
    browser.open(demo.url)
    browser.type("[name=temperature]", "0")
    browser.click("[name=logprobs]")
    for kind in ("chat", "text"):
        browser.click("#new")
        browser.click(f"[name=kind][value={kind}]")
        ask(browser, {"chat": "What is 27 + 45?", "text": "Once upon a time there was"}[kind])
        answered(browser)
        browser.type(".tokens", RIGHT, RIGHT)
        keyed = browser.text(".token-readout")
        assert "log-probability" in keyed and "otherwise" in keyed and "%" in keyed
        hover(browser, ".token:nth-child(3)")
        browser.until(lambda keyed=keyed: browser.text(".token-readout") != keyed)
    press(browser, "Log-probabilities", 0)
    assert browser.js("return document.querySelectorAll('.token').length") == 0


def hover(browser: Browser, selector: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser.driver, duration=0).move_to_element(browser.find(selector)).perform()


def test_try_again_after_an_error(browser: Browser) -> None:
    with serving("demo", "--dry-run") as server:
        browser.open(server.url)
        browser.until(lambda: "demo" in browser.text("#model"))
        # The first request fails as it does without a network.
        browser.js(
            "const real = fetch; window.fetch = (...a) => { window.fetch = real; return Promise.reject(new TypeError()) }"
        )
        ask(browser, "Hello there")
        browser.until(lambda: "cannot be reached" in browser.text(".problem"))
        press(browser, "Try again", 0)
        assert "Hello there" in answered(browser)
        assert browser.js("return document.querySelectorAll('.message').length") == 2


MARKDOWN = [
    ("# Title\n\ntext **bold *both* bold**", "<h4>Title</h4><p>text <strong>bold <em>both</em> bold</strong></p>"),
    ("```py\n<b>*x*</b>\n```", "<code>&lt;b&gt;*x*&lt;/b&gt;</code>"),
    ("```\nopen", "<code>open</code>"),
    ("- a\n- b\n  1. c\n\n- d", "<ul><li><p>a</p></li><li><p>b</p><ol><li>c</li></ol></li><li><p>d</p></li></ul>"),
    ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
    ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
    ("| a | b |\n|---|--:|\n| 1 | `2` |", '<th class="right">b</th></tr></thead><tbody><tr><td>1</td><td class="right"><code>2</code></td>'),
    ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    ("27 * 45 _ snake_case_name 2 ** 3", "<p>27 * 45 _ snake_case_name 2 ** 3</p>"),
    ("\\*no\\* ~~old~~ ~x", "<p>*no* <del>old</del> ~x</p>"),
    ("``a`b`` `open", "<p><code>a`b</code> `open</p>"),
    ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    ("[x](javascript:alert(1)) [y](data:text/html,a)", "<p>[x](javascript:alert(1)) [y](data:text/html,a)</p>"),
    ("**[site](https://a.example/b_(c))**", '<strong><a href="https://a.example/b_(c)" target="_blank" rel="noopener noreferrer nofollow">site</a></strong>'),
    ("see https://a.example/x_y_z.", '>https://a.example/x_y_z</a>.</p>'),
    ("![alt](https://a.example/i.png)", ">alt</a></p>"),
    ("**open and [bracket", "<p>**open and [bracket</p>"),
]  # fmt: skip


def test_markdown(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    code = """
        return import('/static/markdown.js').then((m) => texts.map((text) => {
            const whole = document.createElement('div');
            new m.MarkdownView(whole).show(text);
            const grown = document.createElement('div');
            const view = new m.MarkdownView(grown);
            for (let end = 1; end <= text.length; end++) view.show(text.slice(0, end));
            return [whole.innerHTML, grown.innerHTML];
        }))
    """
    drawn = browser.js("const texts = arguments[0];" + code, [text for text, _ in MARKDOWN])
    for (text, wanted), (whole, grown) in zip(MARKDOWN, drawn):
        assert wanted in whole, text
        assert whole == grown, text


@pytest.mark.parametrize(
    "text", ["[", "](", "*", "`", "**a ", "> ", "- ", "| a |\n", "_a", "h", "![", "`a``b", "\\", "<br", "1. "]
)
def test_markdown_in_linear_time(dry: Server, browser: Browser, text: str) -> None:
    """A renderer with a quadratic pass takes minutes for 200,000 characters."""
    if not browser.driver.current_url.startswith(dry.url):
        browser.open(dry.url)
    code = """
        const text = arguments[0].repeat(200000 / arguments[0].length);
        return import('/static/markdown.js').then((m) => {
            const began = performance.now();
            new m.MarkdownView(document.createElement('div')).show(text);
            return performance.now() - began;
        })
    """
    assert browser.js(code, text) < 15_000


RECEIPT = {
    "e2e_ms": 1234.5,
    "ttft_ms": 50.0,
    "terms_ms": {"queue": 100.0, "prefill": 34.5, "decode": 1100.0, "read": 0.0, "something_new": 100.0},
    "queue_ms": {"slots": 100.0},
    "prompt_tokens": {"total": 20, "cached": 16, "computed": 4, "cache_ended": "evicted"},
    "preemptions": 0,
    "draft_tokens": 9,
    "accepted_tokens": 7,
}


def test_a_receipt_is_a_bar(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    code = "return import('/static/receipt.js').then((m) => m.receiptStrip(arguments[0]).outerHTML)"
    code = code.replace("arguments[0]", "receipt")
    html = browser.js("const receipt = arguments[0]; " + code, RECEIPT)
    for wanted in (
        "1.23 s",
        "something new",
        "100 ms",
        "queued for a slot",
        "was evicted",
        "decode",
        "7 of 9 draft tokens",
    ):
        assert wanted in html, wanted
    assert "read" not in html.replace("spread", "")
    assert html.count("<li>") + html.count('<li class="">') == 5


def test_a_server_with_a_key(browser: Browser) -> None:
    with serving("demo", "--dry-run", "--api-key", "secret") as server:
        browser.open(server.url)
        assert browser.find("#key").is_displayed()
        assert (
            browser.text("#blocked") == "Not sent: this server needs an API key. Enter it at the top right."
        )
        assert browser.complaints() == []  # no request was sent without a key
        browser.type("#key", "wrong", TAB)
        browser.until(lambda: "API key" in browser.text("#model"))
        assert all("401" in line for line in browser.complaints())
        browser.js("document.getElementById('key').value = ''")
        browser.type("#key", "secret", TAB)
        browser.until(lambda: "demo" in browser.text("#model"))
        ask(browser, "Hello there")
        assert "Hello there" in answered(browser)
        browser.click("#tab-live")
        browser.until(lambda: "Live" in browser.text("#connection"))
        browser.driver.get("about:blank")  # otherwise the page misses the server that ends now


# --------------------------------------------------------------------------------------- live view


@pytest.fixture(scope="module")
def busy() -> Iterator[Server]:
    """Start a server with 64 requests, of which 24 fit: they run, wait and share blocks."""
    flags = ["--dry-run", "--dry-run-step-ms", "10", "--max-num-seqs", "24", "--kv-cache-memory", "12m"]

    def body(i: int) -> dict:
        return {"prompt": [*range(10, 90), *[100 + i] * 40], "max_tokens": 300, "ignore_eos": True}

    with serving("demo", *flags) as server, Load(server, 64, body):
        yield server


def test_live_view(busy: Server, browser: Browser) -> None:
    browser.open(busy.url + "/#live")
    browser.until(lambda: browser.text("#connection") == "Live")
    browser.until(
        lambda: browser.js("return document.querySelectorAll('#running tbody tr[data-id]').length") == 24
    )
    browser.until(lambda: "all slots of the batch are in use" in browser.text("#waiting"))
    assert "other requests are ahead" in browser.text("#waiting")
    assert browser.text("#running-count") == "24"
    browser.until(lambda: "steps over" in browser.text("#steps-readout"))
    drawn = """
        const canvas = document.getElementById(arguments[0]);
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const colours = new Set();
        for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) colours.add(data.slice(i, i + 3).join());
        return colours.size;
    """
    assert browser.js(drawn, "steps-canvas") >= 3
    assert browser.js(drawn, "blocks-canvas") >= 12  # ten requests' colours, shared, blank


def test_live_view_by_keyboard(busy: Server, browser: Browser) -> None:
    browser.open(busy.url)
    browser.js("document.getElementById('tab-chat').focus()")
    browser.type("#tab-chat", RIGHT)
    assert browser.find("#live").is_displayed() and not browser.find("#chat").is_displayed()
    browser.until(
        lambda: browser.js("return document.querySelectorAll('#running tbody tr[data-id]').length") > 5
    )
    browser.type("body", "p")
    assert browser.text("#pause") == "Resume" and browser.text("#connection") == "Paused"
    browser.type("#steps-canvas", LEFT * 3)
    assert "step " in browser.text("#steps-readout") and "decode" in browser.text("#steps-readout")
    browser.type("#blocks-canvas", RIGHT * 2)
    assert "Block 1:" in browser.text("#blocks-readout")
    browser.js("document.querySelector('#running tbody tr[tabindex=\"0\"]').focus()")
    browser.driver.switch_to.active_element.send_keys(DOWN, DOWN, ENTER)
    chosen = browser.js("return document.querySelector('#running tr[aria-selected=true]').dataset.id")
    assert f"Request {chosen} holds" in browser.text("#blocks-readout")
    browser.type("body", ESCAPE)
    assert browser.js("return document.querySelectorAll('tr[aria-selected=true]').length") == 0
    browser.type("body", "p")
    browser.until(lambda: browser.text("#connection") == "Live")


def test_live_view_says_how_fast_requests_are(busy: Server, browser: Browser) -> None:
    browser.open(busy.url + "/#live")
    speeds = "return [...document.querySelectorAll('#running tbody tr[data-id] td:nth-child(7)')].map((e) => e.textContent)"
    browser.until(lambda: any(float(speed or 0) > 0 for speed in browser.js(speeds)))


def test_terms_are_explained(busy: Server, browser: Browser) -> None:
    browser.open(busy.url + "/#live")
    browser.until(lambda: browser.text("#figures"))
    unknown = """
        return import('/static/terms.js').then(({ TERMS }) =>
            [...document.querySelectorAll('[data-term]')].map((e) => e.dataset.term).filter((name) => !TERMS[name]))
    """
    assert browser.js(unknown) == []
    assert browser.js("return document.querySelectorAll('#live [data-term]').length") >= 30
    hover(browser, "#steps h2")  # the figures above move while their numbers change
    browser.until(lambda: browser.find("#tip").is_displayed())
    assert "One pass of the model" in browser.text("#tip")
    browser.type("body", ESCAPE)
    assert not browser.find("#tip").is_displayed()
    browser.click("#terms summary")
    assert "Time from the end of the previous step" in browser.text("#glossary")
    assert not browser.find("#drafts-legend").is_displayed()  # no step had drafts


def test_figures_of_drafts_are_shown_if_there_are_any(busy: Server, browser: Browser) -> None:
    browser.open(busy.url + "/#live")
    code = """
        const [state, totals] = arguments;
        return import('/static/figures.js').then(({ Figures }) => {
            const list = document.createElement('dl');
            const figures = new Figures(list);
            figures.show(state);
            const plain = list.textContent;
            Object.assign(state.stats.totals, totals);
            figures.show(state);
            return [plain, list.textContent];
        })
    """
    counts = {"steps": 9, "generated_tokens": 0, "computed_tokens": 0, "prompt_tokens": 0, "preemptions": 0}
    state = {
        "shared_blocks": 0,
        "stats": {
            "load": {"running": 0, "waiting": 0},
            "totals": {**counts, "draft_rows": 0},
            **dict.fromkeys(("blocks", "free_blocks", "cached_blocks", "snapshot_rows"), 1),
        },
    }
    drafts = {"draft_rows": 10, "draft_tokens": 25, "accepted_tokens": 14, "accepted_at": [9, 5, 0]}
    plain, shown = browser.js(code, state, drafts)
    assert "Drafts" not in plain
    assert (
        "Drafts accepted56.0 % of 25 · by position 90, 50, 0 %" in shown
        and "Accepted length2.40 tokens" in shown
    )


STEP = {
    "prefill": 0, "decode": 1, "drafts": 0, "running": 1, "waiting": 0, "preempted": 0, "took_s": 0.01,
    "schedule_s": 0.0, "launch_s": 0.0, "wait_s": 0.0, "retire_s": 0.0,
}  # fmt: skip


def test_gaps_between_steps_are_shown(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    code = """
        const [first, second] = [arguments[0], arguments[1]];
        return import('/static/steps.js').then(({ StepBars }) => {
            const canvas = document.body.appendChild(document.createElement('canvas'));
            const bars = new StepBars(canvas, document.createElement('p'));
            bars.add(first);
            const unknown = bars.clock_s;
            bars.add(second);
            const now_s = Date.now() / 1000;
            bars.restart();
            bars.add([...first, ...second]); // again, as after a pause
            canvas.remove();
            return [unknown, bars.clock_s - now_s, bars.steps.map((step) => step.idle_s), bars.arrange(1000).map(({ x }) => x)];
        })
    """
    first = [STEP | {"step": 1, "time_s": 100.0}, STEP | {"step": 2, "time_s": 100.005}]
    unknown, clock_s, idle_s, x = browser.js(code, first, [STEP | {"step": 3, "time_s": 102.02}])
    assert unknown is None  # the newest of the first steps may have ended long ago
    assert abs(clock_s + 102.03) < 5
    assert [round(s, 3) for s in idle_s] == [0.0, -0.005, 2.0]
    assert x[1] - x[0] == 4 and x[2] - x[1] > 40


def test_live_view_asks_only_while_it_is_seen(busy: Server, browser: Browser) -> None:
    opened = "return performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/live/events')).length"
    browser.open(busy.url)
    time.sleep(0.5)
    assert browser.js(opened) == 0
    browser.click("#tab-live")
    browser.until(lambda: browser.text("#connection") == "Live")
    browser.click("#tab-chat")
    browser.until(lambda: browser.js(opened) == 1)  # recorded when the stream ended


def test_live_view_of_an_idle_engine(dry: Server, browser: Browser) -> None:
    dry.wait_until_idle()
    browser.open(dry.url + "/#live")
    browser.until(lambda: browser.text("#connection") == "Live, idle")
    assert browser.text("#steps-readout")
    assert "No running requests." in browser.text("#running") and browser.text("#waiting-count") == "0"


def test_live_view_when_the_server_ends(browser: Browser) -> None:
    with serving("demo", "--dry-run") as server:
        browser.open(server.url + "/#live")
        browser.until(lambda: "Live" in browser.text("#connection"))
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 4  # an open live view does not delay the shutdown
        browser.until(lambda: "cannot be reached" in browser.text("#gone-text"))
        assert browser.find("#gone").is_displayed() and browser.text("#connection") == "Not connected"
        assert "as it was at" in browser.text("#gone-text")
    browser.driver.get("about:blank")  # otherwise the page reconnects again and again
    assert all("ERR_CONNECTION_REFUSED" in line for line in browser.complaints())


# ------------------------------------------------------------------------------- the API reference


def test_the_api_reference(dry: Server, browser: Browser) -> None:
    described = dry.http.get("/openapi.json").json()
    browser.open(dry.url + "/docs")
    shown = "return [...document.querySelectorAll('.operation h2')].map((e) => e.textContent)"
    routes = [method + path for path, methods in described["paths"].items() for method in methods]
    browser.until(lambda: browser.js(shown) == routes)
    objects = "return [...document.querySelectorAll('.schema h3')].map((e) => e.textContent)"
    assert browser.js(objects) == list(described["components"]["schemas"])
    fields = browser.text("#post-v1-chat-completions .fields")
    for name in described["components"]["schemas"]["ChatRequest"]["properties"]:
        assert name in fields
    assert "from 0 to 100" in fields
    broken = "return [...document.querySelectorAll('a[href^=\"#\"]')].filter((e) => !document.getElementById(e.hash.slice(1))).map((e) => e.href)"
    assert browser.js(broken) == []
    browser.type("#find", "/v1/messages/c")
    assert browser.js(
        "return [...document.querySelectorAll('.operation:not([hidden])')].map((e) => e.id)"
    ) == ["post-v1-messages-count-tokens"]


def test_routes_can_be_tried(browser: Browser) -> None:
    with serving("demo", "--dry-run", "--api-key", "secret") as server:
        browser.open(server.url + "/docs")
        browser.until(lambda: "Enter it at the top right" in browser.text("#state"))
        browser.type("#key", "secret", TAB)
        browser.until(lambda: browser.text("#operations"))
        for page, wanted in (
            ("post-v1-chat-completions", '"content":'),
            ("get-version", '"version"'),
        ):
            browser.js("document.querySelector(`#${arguments[0]} .try`).open = true", page)
            browser.click(f"#{page} .try form button")
            browser.until(lambda page=page, wanted=wanted: wanted in browser.text(f"#{page} .try pre"))
        browser.js("document.querySelector('#post-v1-chat-completions textarea').value = '{'")
        browser.click("#post-v1-chat-completions .try form button")
        browser.until(lambda: "Not sent" in browser.text("#post-v1-chat-completions .try pre"))


# ------------------------------------------------------------------------------------------- looks


def test_light_and_dark(dry: Server, browser: Browser) -> None:
    def brightness() -> int:
        return browser.js("return Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")

    browser.open(dry.url)
    assert brightness() > 200
    browser.prefer("dark")
    assert brightness() < 60
    browser.click("#theme")
    assert browser.text("#theme-name") == "light" and brightness() > 200
    browser.open(dry.url + "/?again")
    assert browser.text("#theme-name") == "light" and brightness() > 200  # the choice is stored
    browser.click("#theme")
    browser.prefer("light")
    assert browser.text("#theme-name") == "dark" and brightness() < 60
    browser.click("#theme")
    assert browser.text("#theme-name") == "system" and brightness() > 200


@pytest.mark.parametrize("width", [360, 768, 1024, 1920])
@pytest.mark.parametrize("view", ["chat", "live"])
def test_nothing_is_wider_than_the_window(busy: Server, browser: Browser, width: int, view: str) -> None:
    browser.resize(width, 800)
    browser.open(f"{busy.url}/#{view}")
    if view == "live":
        browser.until(lambda: "steps over" in browser.text("#steps-readout"))
    wide = "return [...document.querySelectorAll('body, header, main, #live, #messages')].filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.id || e.tagName)"
    assert browser.js(wide) == []


def test_every_control_has_a_name(dry: Server, browser: Browser) -> None:
    browser.open(dry.url)
    unnamed = """
        return [...document.querySelectorAll('button, input, textarea, canvas, [role=tabpanel], [role=grid]')]
            .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim() || e.getAttribute('aria-labelledby')))
            .map((e) => e.outerHTML)
    """
    assert browser.js(unnamed) == []


# ------------------------------------------------------------------------------ without a browser


def test_the_files(dry: Server) -> None:
    page = dry.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    again = dry.http.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    docs = dry.http.get("/docs")
    assert docs.status_code == 200 and "default-src 'none'" in docs.headers["content-security-policy"]
    assert dry.http.get("/static/about.json").json()["needs_key"] is False
    assert dry.http.get("/static/nothing.js").status_code == 404
    for name in ("main.js", "live.js", "style.css"):
        assert dry.http.get(f"/static/{name}").status_code == 200


def test_the_files_ask_for_nothing_from_elsewhere() -> None:
    import quire.serve

    for path in (Path(quire.serve.__file__).parent / "static").iterdir():
        for line in path.read_text().splitlines():
            assert "://" not in line.replace("http://www.w3.org/2000/svg", ""), (path.name, line)


def test_no_page() -> None:
    with serving("demo", "--dry-run", "--no-page") as server:
        assert server.http.get("/").status_code == 404
        assert server.http.get("/docs").status_code == 404
        assert server.http.get("/live/events").status_code == 404


def test_with_a_key_the_page_is_open_and_its_data_are_not() -> None:
    with serving("demo", "--dry-run", "--api-key", "secret") as server:
        assert server.http.get("/").status_code == 200
        assert server.http.get("/static/about.json").json()["needs_key"] is True
        assert server.http.get("/live/events").status_code == 401
