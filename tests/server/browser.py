"""A real browser for tests of the web page: headless Chromium driven by Selenium, if both are installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_WAIT_S = 60


def missing() -> str | None:
    """Return the reason why no browser is available, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if not any(map(shutil.which, _CHROMIUM)):
        return "there is no Chromium on this machine"
    return None if shutil.which("chromedriver") else "there is no chromedriver on this machine"


class Browser:
    """A browser window. `driver` is Selenium's; waits poll for up to a minute."""

    def __init__(self, profile: Path, width: int = 1440, height: int = 900) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = next(path for name in _CHROMIUM if (path := shutil.which(name)))
        for flag in (
            "headless",
            "no-sandbox",
            "disable-gpu",
            "disable-background-networking",
            "disable-component-update",
            "disable-sync",
            "hide-scrollbars",
            f"user-data-dir={profile}",
        ):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver: Any = webdriver.Chrome(options, service)
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        """Set the viewport to exactly this size, which may be below the minimum of a window."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Set the colour scheme of the system: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.until(lambda: self.js("return document.getElementById('theme-name').textContent !== ''"))

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def type(self, selector: str, *keys: str) -> None:
        self.find(selector).send_keys(*keys)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def until(self, true: Callable[[], Any]) -> Any:
        """Wait until `true` returns a true value, and return it."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.wait import WebDriverWait

        stale = [StaleElementReferenceException]
        return WebDriverWait(self.driver, _WAIT_S, 0.05, stale).until(lambda _: true())

    def complaints(self) -> list[str]:
        """Return the console messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def close(self) -> None:
        self.driver.quit()


@contextmanager
def browsing(profile: Path, **size: int) -> Iterator[Browser]:
    if reason := missing():
        pytest.skip(reason)
    browser = Browser(profile, **size)
    try:
        yield browser
    finally:
        browser.close()
