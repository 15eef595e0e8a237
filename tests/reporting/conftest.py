"""A browser for the tests of pages."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from reporting.browser import Browser, started_browser


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture
def browser(profile: Path) -> Iterator[Browser]:
    with started_browser(profile) as browser:
        yield browser
    shutil.rmtree(profile, ignore_errors=True)
