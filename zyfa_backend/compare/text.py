"""The text that is scored: the shipped default, and how token sequences are cut from a text."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

DEFAULT_NAME = "shipped public-domain text"
SHORTEST_WINDOW = 16


class TextError(ValueError):
    """A text cannot be read or is too short; the message says what would be enough."""


def default_text() -> str:
    """The shipped text: eight public-domain pieces in the order of their file names (see data/ORIGINS.md)."""
    data = resources.files(__package__).joinpath("data")
    pieces = sorted((entry for entry in data.iterdir() if entry.name.endswith(".txt")), key=lambda entry: entry.name)
    return "\n\n".join(piece.read_text(encoding="utf-8").strip() for piece in pieces) + "\n"


def read_text(path: Path) -> str:
    """A user's text, UTF-8. Raises TextError when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from error
    if not text.strip():
        raise TextError(f"{path} holds no text")
    return text


@dataclass(frozen=True)
class Plan:
    """Token ids that every variant gets: windows to score and prompts to continue, with the model's BOS, if any."""

    windows: list[list[int]]
    prompts: list[list[int]]
    text_tokens: int

    @property
    def scored_tokens(self) -> int:
        """Positions with a predecessor: the first token of a window has no distribution."""
        return sum(len(window) - 1 for window in self.windows)


def cut_windows(ids: list[int], bos: list[int], tokens: int, context: int) -> list[list[int]]:
    """Windows of `context` tokens (the last may be shorter) that hold `tokens` tokens together, spread over the text.

    They start at equal distances, so that a text of several kinds of prose contributes each kind. Text shorter than
    `tokens` is used whole. Raises TextError when not even one short window fits.
    """
    body = context - len(bos)
    if body < SHORTEST_WINDOW:
        raise TextError(f"a context of {context} tokens is too short; at least {SHORTEST_WINDOW + len(bos)} are needed")
    wanted = min(tokens, len(ids))
    lengths = [body] * (wanted // body)
    if wanted % body >= SHORTEST_WINDOW:
        lengths.append(wanted % body)
    if not lengths:
        raise TextError(f"{wanted} tokens of text are too few; at least {SHORTEST_WINDOW} are needed")
    stride = len(ids) // len(lengths)
    # With the whole text in use the last window is the short one, and a stride below `body` would overlap.
    starts = [index * (body if stride < body else stride) for index in range(len(lengths))]
    return [bos + ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def cut_prompts(ids: list[int], bos: list[int], count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens at equal distances, no two with the same beginning. Raises TextError."""
    body = length - len(bos)
    if body < 1:
        raise TextError(f"a prompt of {length} tokens is too short")
    room = len(ids) - body
    if room < count:
        raise TextError(
            f"the text has {len(ids)} tokens, too few for {count} prompts of {length}; "
            f"give a longer text, fewer --prompts or fewer --prompt-tokens"
        )
    # Half a step in, so that prompts do not begin where windows do.
    starts = [(2 * index + 1) * room // (2 * count) for index in range(count)]
    return [bos + ids[start : start + body] for start in starts]
