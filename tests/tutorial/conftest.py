"""A browser for the tests of the site's pages."""

from collections.abc import Iterator

import pytest
from reporting.browser import Browser, started_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
