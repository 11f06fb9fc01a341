"""The shipped text and how token sequences are cut."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zyfa_backend.compare import text
from zyfa_backend.compare.text import TextError, cut_prompts, cut_windows


def test_the_shipped_text_is_long_and_of_several_kinds():
    shipped = text.default_text()
    # At least 16K tokens of any usual tokenizer: English prose takes 4 to 5 characters per token.
    assert len(shipped) > 16384 * 5
    assert len(shipped.split()) > 16384  # and no tokenizer makes fewer tokens than there are words
    for phrase in (
        "It is a truth universally acknowledged",
        "The Light of the Sun consists of Rays differently Refrangible",
        "We the People of the United States",
        "When in the Course of human events",
        "Fellow-Citizens of the Senate",
    ):
        assert phrase in shipped


def test_the_shipped_text_carries_no_notes_of_a_digital_edition():
    shipped = text.default_text()
    assert not re.search(r"gutenberg|etext|e-text|www\.|https?:|copyright \(c\)|produced by|proofread", shipped, re.I)
    assert not re.search(r"_|\[Illustration|\[Footnote|\r|\t", shipped)
    assert all(character.isprintable() or character == "\n" for character in shipped)


def test_every_piece_has_its_origin():
    data = resources.files("zyfa_backend.compare").joinpath("data")
    origins = data.joinpath("ORIGINS.md").read_text(encoding="utf-8")
    pieces = [entry.name for entry in data.iterdir() if entry.name.endswith(".txt")]
    assert len(pieces) >= 5
    for piece in pieces:
        row = next(line for line in origins.splitlines() if f"`{piece}`" in line)
        year = int(re.search(r"\b1[0-9]{3}\b", row.split("|")[4] + row.split("|")[3])[0])
        assert year < 1929


def test_files_that_are_not_text(tmp_path):
    with pytest.raises(TextError, match="cannot read.*missing"):
        text.read_text(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TextError, match="not UTF-8"):
        text.read_text(tmp_path / "binary")
    (tmp_path / "blank").write_text(" \n")
    with pytest.raises(TextError, match="no text"):
        text.read_text(tmp_path / "blank")


def test_windows_are_spread_over_the_text():
    ids = list(range(10_000))
    windows = cut_windows(ids, [], tokens=3000, context=1000)
    assert [window[0] for window in windows] == [0, 3333, 6666]
    assert [len(window) for window in windows] == [1000, 1000, 1000]


def test_windows_of_the_whole_text_do_not_overlap_and_keep_the_remainder():
    ids = list(range(5000))
    windows = cut_windows(ids, [], tokens=10**6, context=2048)
    assert [len(window) for window in windows] == [2048, 2048, 904]
    assert sum(windows, []) == ids


def test_every_window_begins_with_bos_and_keeps_to_the_context():
    windows = cut_windows(list(range(100, 1100)), [1], tokens=200, context=101)
    assert [len(window) for window in windows] == [101, 101]
    assert all(window[0] == 1 for window in windows)
    assert windows[0][1:] == list(range(100, 200))


@given(
    length=st.integers(16, 5000),
    tokens=st.integers(16, 6000),
    context=st.integers(17, 3000),
    bos=st.sampled_from([[], [7]]),
)
def test_windows_in_general(length, tokens, context, bos):
    ids = list(range(1000, 1000 + length))
    windows = cut_windows(ids, bos, tokens, context)
    body = context - len(bos)
    seen: set[int] = set()
    for window in windows:
        assert window[: len(bos)] == bos and len(window) <= context
        own = window[len(bos) :]
        assert own == list(range(own[0], own[0] + len(own)))  # a run of the text
        assert seen.isdisjoint(own)
        seen.update(own)
    # All that was asked for, but for a remainder too short for a window.
    assert 0 <= min(tokens, length) - len(seen) < min(16, body + 1)


@pytest.mark.parametrize(
    ("ids", "tokens", "context", "said"),
    [(list(range(100)), 50, 8, "context of 8"), (list(range(5)), 50, 100, "5 tokens")],
)
def test_too_little_for_a_window(ids, tokens, context, said):
    with pytest.raises(TextError, match=said):
        cut_windows(ids, [], tokens, context)


@given(spare=st.integers(0, 3000), count=st.integers(1, 16), size=st.integers(2, 24))
def test_prompts_have_the_length_asked_for_and_different_beginnings(spare, count, size):
    length = size + count + spare
    prompts = cut_prompts(list(range(length)), [], count, size)
    assert [len(prompt) for prompt in prompts] == [size] * count
    assert len({prompt[0] for prompt in prompts}) == count


def test_too_little_text_for_the_prompts():
    with pytest.raises(TextError, match="20 tokens, too few for 16 prompts of 10"):
        cut_prompts(list(range(20)), [], 16, 10)
