"""Datasets of the Hugging Face Hub, `hf://owner/name`, and the files that they are kept in.

`datasets` downloads a dataset and keeps it as Arrow files; those are read here like any other
table, so that a run needs neither the Hub nor the library after that. Datasets that bring code are
refused.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from urllib3.exceptions import HTTPError, SSLError

from vitkit.data.datasets.build import POOL
from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset
from vitkit.data.datasets.splitting import is_hidden
from vitkit.data.sources.image_folder import open_folder
from vitkit.data.sources.shards import files_by_split
from vitkit.data.sources.tables import open_tables
from vitkit.errors import DataError, MissingExtraError
from vitkit.io.download import connections
from vitkit.messages import escape, quote_list

if TYPE_CHECKING:
    import datasets

HUB_PREFIX = "hf://"
HUB_ADDRESS = re.compile(
    r"hf://(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<config>[\w.+-]+))?"
)
COMMIT = re.compile(r"[0-9a-f]{7,40}")
HUB_PATIENCE = 2.0
"""Seconds to wait for the Hub's first response; after that only the cache is used."""


def open_hub(address: str, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open a dataset of the Hub, downloaded if it is not in the cache.

    Args:
        address: `hf://owner/name`, with `@revision`, and `:config` where it has several.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError: no such dataset, or not in the cache and the Hub out of reach; one that needs its
            own code; and the errors of `open_tables`.
        MissingExtraError: `datasets` is not installed.
    """
    match = HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise DataError(
            f"{escape(address)}: expected hf://owner/name, hf://owner/name@revision or "
            f"hf://owner/name:config"
        )
    name, revision = match["name"], match["revision"]
    # `load_dataset` prefers a local folder to the Hub.
    if Path(name).exists():
        raise DataError(
            f"{address}: the working folder has a folder {name}, which the library `datasets` "
            "would read instead of the Hub's; start in another folder, or open that one by "
            f"./{name}"
        )
    loaded = _load(address, name, revision, match["config"])
    if loaded is None:
        return _open_snapshot(address, name, revision, ignore_extra_classes)
    splits, offline = loaded
    files, unread = _files_by_split(splits)
    if not files:
        raise DataError(
            f"{address}: its splits are {quote_list(unread)}; expected train, val or test"
        )
    notes = [f"splits not read: {quote_list(unread)}"] if unread else []
    if offline and revision:
        notes += _check_revision(address, revision, next(iter(files.values())))
    return open_tables(
        name.partition("/")[2],
        address,
        files,
        "arrow",
        # A row may name a file that was downloaded, instead of holding its bytes.
        roots=_roots(),
        ignore_extra_classes=ignore_extra_classes,
        notes=notes,
    )


def open_from_hub(address: str, name: str, folders: Sequence[Path], how_to_get: str) -> Dataset:
    """Open a dataset from the Hub whose files are in none of the folders.

    Args:
        address: `hf://owner/name`.
        name: name of the dataset, for messages.
        folders: those that were searched.
        how_to_get: where the files come from, for messages.

    Raises:
        DataError: it cannot be opened; the message has how to get the files, then the folders.
    """
    try:
        return open_hub(address)
    except (MissingExtraError, DataError) as error:
        searched = ", ".join(map(str, folders))
        # the remedy first, as a reader may stop there
        if isinstance(error, MissingExtraError):
            how_to_get = f"pip install 'vitkit[hub]' lets vitkit download it; or {how_to_get}"
        raise DataError(
            f"{name} not found; {how_to_get}; searched {searched} and the Hub ({error})"
        ) from None


def _files_by_split(splits: datasets.DatasetDict) -> tuple[dict[str, list[Path]], list[str]]:
    """Return the Arrow files of train, val and test, and the names of the other splits."""
    files: dict[str, list[Path]] = {}
    unread = []
    for name, part in splits.items():
        split = SPLIT_WORDS.get(name.lower())
        # `validation` and `dev` are both val: the first one counts.
        if split is None or split in files:
            unread.append(name)
        else:
            files[split] = [Path(file["filename"]) for file in part.cache_files]
    return files, unread


def _load(
    address: str, name: str, revision: str | None, config: str | None
) -> tuple[datasets.DatasetDict, bool] | None:
    """Load all splits of a dataset by `datasets`; the second value is True if it was offline.

    None where it is not in that cache and the Hub is out of reach.
    """
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(
            f"{address} needs datasets; install it: pip install 'vitkit[hub]'"
        ) from None
    offline = not _is_reachable()
    try:
        with _kept_offline(offline):
            splits = datasets.load_dataset(name, config, revision=revision, keep_in_memory=False)
            return splits, offline
    except ConnectionError:
        return None
    except Exception as error:  # whatever `datasets` raises for a repository that it cannot read
        if "scripts are no longer supported" in str(error):
            raise DataError(
                f"{address}: this dataset is read by its own Python code, which vitkit does not "
                f"run; look for a revision in Parquet (hf://{name}@refs/convert/parquet)"
            ) from error
        raise DataError(f"{address}: cannot be loaded: {_first_line(error)}") from error


def _open_snapshot(
    address: str, name: str, revision: str | None, ignore_extra_classes: bool
) -> Dataset:
    """Open the files that `hf download --repo-type dataset` left in the Hub library's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True)
        )
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise DataError(
            f"{address}: not in the cache, and the Hub cannot be reached; check the network and "
            "HF_HUB_OFFLINE, or pass a folder"
        ) from error
    if parquet_files(folder):
        opened = open_parquet(folder, ignore_extra_classes=ignore_extra_classes)
    else:  # its files are links to another folder of the cache
        opened = open_folder(folder, ignore_extra_classes=ignore_extra_classes, follow_links=True)
    note = f"{address}: the Hub was not reached; read from {escape(folder)}"
    return dataclasses.replace(opened, name=name.partition("/")[2], notes=(*opened.notes, note))


def _is_reachable() -> bool:
    """Return True if the Hub answers within `HUB_PATIENCE`; `datasets` would retry for 30 s."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    # In a separate thread: resolving a host name has no time limit.
    ask = threading.Thread(target=lambda: answers.put(_answers(constants.ENDPOINT)), daemon=True)
    ask.start()
    try:
        return answers.get(timeout=HUB_PATIENCE)
    except queue.Empty:
        return False


def _answers(address: str) -> bool:
    try:
        connections(address).request("HEAD", address, timeout=HUB_PATIENCE, retries=False)
    except SSLError:
        # A certificate error is an answer, too: the Hub's library has its own certificates.
        return True
    except (HTTPError, ValueError):
        return False
    return True


@contextmanager
def _kept_offline(offline: bool) -> Iterator[None]:
    """Make `datasets` use its cache alone inside the block, if `offline`."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if offline:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _check_revision(address: str, revision: str, files: list[Path]) -> list[str]:
    """Refuse another revision than the wanted one, or return a note where that is unknown.

    Offline, `datasets` takes the newest of its cache, whatever the wanted revision. It keeps a
    dataset in a folder named after its commit.
    """
    commit = files[0].parent.name
    if commit.startswith(revision):
        return []
    # A branch or a tag has another name than its commit; only a commit can be compared.
    if COMMIT.fullmatch(revision):
        raise DataError(
            f"{address}: the cache has {commit} of it, and the Hub cannot be reached; check the "
            f"network, or pass @{commit}"
        )
    return [
        f"the cache has {commit}; without a network vitkit cannot tell whether that is {revision!r}"
    ]


def _roots() -> list[Path]:
    """Return the folders where `datasets` puts its downloads."""
    import datasets
    from huggingface_hub import constants

    return [Path(datasets.config.HF_DATASETS_CACHE), Path(constants.HF_HUB_CACHE)]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# Parquet files with images in them, as the Hub stores them: one file, or a folder of shards.

PARQUET_ENDING = ".parquet"
DATA_FOLDER = "data"
"""The folder where repositories of the Hub have their files."""


def parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder, or of `data/` in it, in order.

    Empty where it cannot be listed, or has other folders: images are in those then.
    """
    try:
        for path in folder.iterdir():
            # The folder also holds images: the tables are lists of them.
            if path.is_dir() and path.name != DATA_FOLDER and not is_hidden(path.name):
                return []
        for parent in (folder, folder / DATA_FOLDER):
            tables = [
                path for path in parent.glob(f"*{PARQUET_ENDING}") if not is_hidden(path.name)
            ]
            if tables:
                return sorted(filter(Path.is_file, tables))
    except OSError:  # the folder cannot be listed: the error is raised when it is opened
        return []
    return []


def open_parquet(path: Path, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open a Parquet file, or a folder of them; each is read through once.

    Files with train, val or test in their names are those splits, such as
    `train-00000-of-00002.parquet`; a set without such names is cut 70/10/20.

    Args:
        path: the file or the folder.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError, MissingExtraError: as `open_tables`.
    """
    files = parquet_files(path) if path.is_dir() else [path]
    where = escape(path)
    groups = files_by_split([file.name for file in files], where)
    by_split = {}
    for split, indices in groups.items():
        by_split[split] = [files[index] for index in indices]
    name = escape(path.absolute().name.removesuffix(PARQUET_ENDING)) or "data"
    return open_tables(name, where, by_split, "parquet", ignore_extra_classes=ignore_extra_classes)


# Folders that `Dataset.save_to_disk` of the library `datasets` wrote: Arrow files, listed as JSON.
#
# One split is a folder with `state.json`, which names its files; several are folders of that kind
# beside `dataset_dict.json`, which names the splits.

STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Return True if a folder was written by `save_to_disk`."""
    try:
        if (folder / SPLITS).is_file():
            return True
        return (folder / STATE).is_file() and any(folder.glob("*.arrow"))
    except OSError:
        return False


def open_saved(folder: Path, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open a folder of `save_to_disk`; one without splits is cut 70/10/20.

    Args:
        folder: the folder that `save_to_disk` wrote.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError, MissingExtraError: as `open_tables`; files that are listed and not there.
    """
    where = escape(folder)
    notes: list[str] = []
    files: dict[str, list[Path]] = {}
    if (folder / SPLITS).is_file():
        names = _strings(folder / SPLITS, _json(folder / SPLITS).get("splits"))
        unread = []
        for name in names:
            split = SPLIT_WORDS.get(name.lower())
            if split is None:
                unread.append(name)
            elif split not in files:
                files[split] = _files(folder / name)
        if not files:
            found = quote_list(names) or "none"
            raise DataError(f"{where}: its splits are {found}; expected train, val or test")
        if unread:
            notes.append(f"splits not read: {quote_list(unread)}")
    else:
        files[POOL] = _files(folder)
    return open_tables(
        escape(folder.absolute().name) or "data",
        where,
        files,
        "arrow",
        ignore_extra_classes=ignore_extra_classes,
        notes=notes,
    )


def _files(folder: Path) -> list[Path]:
    entries = _json(folder / STATE).get("_data_files")
    if not isinstance(entries, list):
        entries = []
    # [{"filename": "data-00000-of-00001.arrow"}, ...]
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    # A name is never a path: nothing outside of the folder is read.
    files = [folder / Path(name).name for name in _strings(folder / STATE, names)]
    for file in files or [folder]:
        if not file.is_file():
            raise DataError(f"{escape(file)}: no such Arrow file")
    return files


def _json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{escape(path)}: cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _strings(path: Path, content: object) -> list[str]:
    if isinstance(content, list) and all(isinstance(item, str) for item in content):
        return content
    raise DataError(f"{escape(path)}: expected a list of names, got {str(content)[:80]!r}")
