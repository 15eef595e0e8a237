"""Class names: their order and what is refused."""

from __future__ import annotations

import itertools
import unicodedata

import pytest

from vitkit import DataError
from vitkit.data.datasets.splitting import (
    doubtful_names,
    is_hidden,
    match_classes,
    natural_order,
    refuse_look_alikes,
)
from vitkit.messages import quote_list


@pytest.mark.parametrize(
    "ordered",
    [
        ("0", "1", "2", "9", "10", "11", "100"),
        ("img1", "img2", "img10"),
        ("class 9 b", "class 10 a"),
        ("7", "007", "cat"),
        ("3", "B", "a", "b"),
        ("v1.2", "v1.10", "v1.10a"),
    ],
)
def test_natural_order_from_any_order(ordered: tuple[str, ...]) -> None:
    expected = natural_order(ordered)
    if ordered != ("7", "007", "cat"):
        assert expected == ordered
    for shuffled in itertools.islice(itertools.permutations(ordered), 50):
        assert natural_order(shuffled) == expected


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        (".git", True),
        (".ipynb_checkpoints", True),
        ("__MACOSX", True),
        ("@eaDir", True),
        ("cat", False),
        ("_", False),
    ],
)
def test_hidden_names(name: str, hidden: bool) -> None:
    assert is_hidden(name) is hidden


@pytest.mark.parametrize(
    "names",
    [
        ("Cat", "cat"),
        ("STRASSE", "straße"),
        (unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")),
        (unicodedata.normalize("NFC", "CAFÉ"), unicodedata.normalize("NFD", "café")),
    ],
)
def test_names_that_look_alike_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(DataError) as caught:
        refuse_look_alikes(("dog", *names), "/data")
    assert all(ascii(name) in str(caught.value) for name in names)
    refuse_look_alikes(("dog", names[0], names[0]), "/data")


@pytest.mark.parametrize(
    "names",
    [("cat", "cat "), ("great white", "great_white"), ("great-white", "GreatWhite"), ("1", "01"),
     ("cat", "\uff43\uff41\uff54"), ("cat", "c\u200bat"), ("img 7", "img 007")],
)  # fmt: skip
def test_names_that_may_be_one_class_are_noted(names: tuple[str, str]) -> None:
    (line,) = doubtful_names(("dog", *names))
    assert all(ascii(name) in line for name in names)
    assert "look alike" in line


def test_names_that_are_none_are_noted_and_others_are_not() -> None:
    assert "missing label" in doubtful_names(["dog", "NaN"])[0]
    assert doubtful_names(["dog", "nancy", "1", "10", "100", "1.5", "1.05", "-", "_"]) == []


def test_names_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(DataError, match="not valid UTF-8"):
        refuse_look_alikes(["a", "b\udcff"], "/data")


def test_long_lists_are_cut() -> None:
    assert quote_list("abc") == "'a', 'b', 'c'"
    assert quote_list("abcdef", most=2) == "'a', 'b' and 4 more"


def test_classes_are_matched_by_name_and_two_of_one_name_are_ambiguous() -> None:
    match = match_classes(["dog", "bird", "cat"], ["cat", "dog", "owl", "cat"])
    assert match.indices == (1, 0)
    assert (match.unknown, match.unused) == (("bird",), ("owl",))
    assert match.ambiguous == ("cat",)
    assert match_classes(["dog"], ["cat", "dog", "cat"]).ambiguous == ()
