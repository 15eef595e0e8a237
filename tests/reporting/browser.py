"""A headless Chromium, driven by the WebDriver protocol (https://www.w3.org/TR/webdriver2/)."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3
from processes import wait_until

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDS_BROWSER = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium and its driver are missing"),
    pytest.mark.allow_hosts(["127.0.0.1"]),
]
"""Marks of the tests that open a page."""


def needs_browser(test: Callable[..., None]) -> Callable[..., None]:
    for mark in NEEDS_BROWSER:
        test = mark(test)
    return test


SWITCHES = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--no-first-run", "--disable-dev-shm-usage",
]  # fmt: skip
KEYS = {"tab": "\ue004", "enter": "\ue007", "space": " ", "right": "\ue014"}


class Browser:
    """A page in Chromium.

    Args:
        port: of chromedriver on this computer.
        profile: an empty folder.
    """

    def __init__(self, port: int, profile: Path) -> None:
        self._http = urllib3.PoolManager(timeout=60)
        self._base = f"http://127.0.0.1:{port}/session"
        options = {
            "binary": CHROMIUM,
            "args": [*SWITCHES, f"--user-data-dir={profile}"],
            "perfLoggingPrefs": {"enableNetwork": True},
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._session = ""
        session = self._send("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self._session = f"/{session}"

    def _send(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        sent = json.dumps(body) if method == "POST" else None
        answer = self._http.request(
            method, self._base + self._session + path, body=sent,
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        value = json.loads(answer.data)["value"]
        assert answer.status == 200, value
        return value

    def open(self, page: Path) -> None:
        """Open a page, and wait until all of it is there."""
        # what the browser loads for its own first page is no request of ours
        self._send("/url", {"url": "about:blank"})
        self.console(), self.requests()
        self._send("/url", {"url": page.resolve().as_uri()})
        # the driver answers now and then while the page is still being read
        loaded = "return location.protocol === 'file:' && document.readyState === 'complete'"
        wait_until(lambda: self.run(loaded))

    def run(self, script: str) -> Any:
        """Return what a script returns; it is run outside of the page's own policy."""
        return self._send("/execute/sync", {"script": script, "args": []})

    def press(self, *keys: str) -> None:
        """Press keys one after another, wherever the focus is."""
        actions = []
        for key in keys:
            actions += [
                {"type": "keyDown", "value": KEYS[key]}, {"type": "keyUp", "value": KEYS[key]}
            ]  # fmt: skip
        self._send("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def click(self, selector: str) -> None:
        found = self._send("/element", {"using": "css selector", "value": selector})
        self._send(f"/element/{next(iter(found.values()))}/click", {})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._send("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def show(self, width: int, scheme: str = "light", media: str = "screen") -> None:
        """Set the width in CSS pixels, the colour scheme and the medium."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", media=media, features=features)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        found = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def console(self) -> list[str]:
        """Return the messages of the console since the last call: errors and violations."""
        return [entry["message"] for entry in self._send("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call, but for data inside."""
        found = []
        for entry in self._send("/se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [address for address in found if not address.startswith("data:")]

    def close(self) -> None:
        self._send("", {}, method="DELETE")


@contextmanager
def started_browser(profile: Path) -> Iterator[Browser]:
    """Start chromedriver and a browser on free ports, and end both."""
    assert DRIVER is not None
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        port = next(
            int(found[1])
            for line in driver.stdout
            if (found := re.search(r"successfully on port (\d+)", line))
        )
        browser = Browser(port, profile)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait()
        if driver.stdout is not None:
            driver.stdout.close()
