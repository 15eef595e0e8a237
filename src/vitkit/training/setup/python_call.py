"""The settings of one call of `vitkit.train`, whose values may be Python objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vitkit.data.sources.open import DataSource, kept_data
from vitkit.io.import_path import given
from vitkit.training.config.passed_objects import refuse_missing, with_names
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.resume import settings_of_call


@contextmanager
def settings_of_python_call(
    data: DataSource | None, settings: Mapping[str, Any]
) -> Iterator[TrainConfig]:
    """Yield the settings of a call; its objects are found by their names while the block runs.

    Args:
        data: as for `vitkit.train`; None for that of the run that is resumed.
        settings: the keywords, `recipe` among them.

    Raises:
        UserError: wrong settings or data; or the resumed run needs objects that were not passed.
    """
    texts, objects = with_names(settings)
    # names of objects have a meaning in this call alone
    with given(objects), kept_data(data) as address:
        if address is not None:
            texts["data"] = address
        config = settings_of_call(texts)
        refuse_missing(config)
        yield config
