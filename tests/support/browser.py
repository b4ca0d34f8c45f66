"""A real browser, where driver and browser start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

CHROMIUM = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome", "/opt/google/chrome/chrome")

NO_BROWSER = "no browser starts here; apt-get install chromium libatomic1"


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium, else the one that Playwright has fetched. Without either the test is skipped."""
    # A driver that misses a library would otherwise fail somewhere in Playwright.
    driver = subprocess.run(
        [sys.executable, "-m", "playwright", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    if driver.returncode:
        _skip(driver.stderr)
    found = next((path for path in CHROMIUM if Path(path).exists()), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as fault:
            _skip(str(fault))
        yield browser
        browser.close()


def _skip(reason: str) -> NoReturn:
    pytest.skip(f"{NO_BROWSER} ({reason.partition(chr(10))[0][:200]})")
