"""Which kernels ran, how often and over how many tokens, in memory and as a file that survives a killed process."""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading

_WIDTH = 16  # digits of a number in the file


class Counters:
    """Calls and tokens per kernel, and named events, of this process; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[str, dict[str, int]] = {}
        self._events: dict[str, int] = {}
        self._file: _StatsFile | None = None

    def add(self, kernel: str, tokens: int) -> None:
        """Count one call of `kernel` over `tokens` query tokens."""
        with self._lock:
            entry = self._kernels.setdefault(kernel, {"calls": 0, "tokens": 0})
            entry["calls"] += 1
            entry["tokens"] += tokens
            if self._file is not None:
                self._file.show(self._kernels, self._events, kernel)

    def event(self, name: str, count: int = 1) -> int:
        """Add to a named event (e.g. saturated values) and return its total."""
        with self._lock:
            self._events[name] = self._events.get(name, 0) + count
            if self._file is not None:
                self._file.show(self._kernels, self._events, None)
            return self._events[name]

    def snapshot(self) -> dict:
        """`{"kernels": {name: {"calls", "tokens"}}, "events": {name: count}}` of this process."""
        with self._lock:
            return {"kernels": {k: dict(v) for k, v in self._kernels.items()}, "events": dict(self._events)}

    def reset(self) -> None:
        with self._lock:
            self._kernels.clear()
            self._events.clear()

    def write_to(self, directory: str) -> None:
        """From the first kernel on, keep `stats-<pid>.json` in `directory` up to date. Raises OSError."""
        os.makedirs(directory, exist_ok=True)
        with self._lock:
            if self._file is None or self._file.directory != directory:
                self._file = _StatsFile(directory)


class _StatsFile:
    """A JSON file whose numbers are overwritten in place.

    An engine's process ends by SIGTERM or SIGKILL, without exit handlers: what is in a mapped file stays all the same.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._path = os.path.join(directory, f"stats-{os.getpid()}.json")
        self._map: mmap.mmap | None = None
        self._places: dict[str, int] = {}
        self._names: tuple = ()

    def show(self, kernels: dict[str, dict[str, int]], events: dict[str, int], changed: str | None) -> None:
        """Bring the file up to date with one changed kernel, or with all events."""
        names = (*kernels, None, *events)
        if names != self._names:
            self._rewrite(kernels, events)
            self._names = names
            return
        if changed is not None:
            for field, number in kernels[changed].items():
                self._put(f"{changed} {field}", number)
        else:
            for name, number in events.items():
                self._put(name, number)

    def _put(self, key: str, number: int) -> None:
        assert self._map is not None
        start = self._places[key]
        self._map[start : start + _WIDTH] = b"%*d" % (_WIDTH, number)

    def _rewrite(self, kernels: dict[str, dict[str, int]], events: dict[str, int]) -> None:
        """A new name changes the layout: write the whole file anew and note where each number stands."""
        self._places = {}
        text = f'{{"pid": {os.getpid()}, "command": {json.dumps(sys.argv)}, "kernels": {{'.encode()

        def number(key: str, value: int) -> None:
            nonlocal text
            self._places[key] = len(text)
            text += b"%*d" % (_WIDTH, value)

        for index, (name, entry) in enumerate(kernels.items()):
            text += (", " if index else "").encode() + json.dumps(name).encode() + b': {"calls": '
            number(f"{name} calls", entry["calls"])
            text += b', "tokens": '
            number(f"{name} tokens", entry["tokens"])
            text += b"}"
        text += b'}, "events": {'
        for index, (name, count) in enumerate(events.items()):
            text += (", " if index else "").encode() + json.dumps(name).encode() + b": "
            number(name, count)
        text += b"}}\n"
        part = f"{self._path}.part"
        with open(part, "w+b") as stream:
            stream.write(text)
            stream.flush()
            self._map = mmap.mmap(stream.fileno(), len(text))
        os.replace(part, self._path)
