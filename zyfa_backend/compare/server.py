"""Starts one server, waits until it is healthy, and ends it with all of its processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from .client import Client

TAIL_LINES = 25
GRACE_S, HURRIED_GRACE_S = 30.0, 5.0
# Settings of ZYFA and the server's own credentials never leak from the user's shell into the baseline's server.
PRIVATE = ("VLLM_ATTENTION_BACKEND", "VLLM_API_KEY")
# GiB of cache; by default the CPU build takes most of the memory.
VLLM_DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# What vLLM writes before each line of a traceback: "(Worker pid=1) ERROR 12-01 21:38:57 [executor.py:953] ".
LOG_PREFIX = re.compile(r"^(\(\w[^)]*\) )?((DEBUG|INFO|WARNING|ERROR) \S+ \S+ \[[^\]]*\] )?")
EXCEPTION = re.compile(r"^([\w.]+\.)?\w*(Error|Exception|Refused|Unsupported)\b: \S")


class ServerError(RuntimeError):
    """A server could not be started, died or hung; the message holds its command and last log lines."""


def vllm_executable() -> str:
    """The `vllm` beside this Python, else the one on PATH. Raises ServerError when there is none."""
    beside = Path(sys.executable).parent / "vllm"
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if not found:
        raise ServerError(
            "vLLM is not installed: no `vllm` beside this Python or on PATH; install it, or compare running servers "
            "with --url NAME=http://HOST:PORT"
        )
    return found


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands to outgoing connections.

    A server binds it only tens of seconds later; by then a connection of any process may have taken one of the others.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Raises ServerError when something listens on 127.0.0.1:port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(
                f"port {port} is taken or not allowed ({error.strerror}); give another with --port, "
                f"or leave it out to have a free one chosen"
            ) from error


def server_environment(
    model: str,
    overrides: Mapping[str, str],
    inherited: Mapping[str, str],
    defaults: Mapping[str, str] = VLLM_DEFAULTS,
) -> dict[str, str]:
    """The environment of a server: the caller's, without its choice of backend and ZYFA's switches, and `overrides`.

    defaults: what the engine gets where the caller has not set it.

    A variant means what its name says only with the switches that it sets itself.
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in PRIVATE and not name.startswith("ZYFA_")
    }
    if Path(model).is_dir():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    return {**defaults, **environment, **overrides}


class Server:
    """A running server as a context manager, started once.

    command, env: what to start. log: file that gets its output. url: where it will listen.
    Raises ServerError from start() when it dies or is not healthy within `startup_timeout_s`.
    """

    def __init__(self, command: list[str], env: dict[str, str], log: Path, url: str, startup_timeout_s: float) -> None:
        self.command = command
        self.env = env
        self.log = log
        self.url = url
        self.startup_timeout_s = startup_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.stop(in_order=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(in_order=kind is None)

    def start(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

        def die_with_parent() -> None:
            if libc is not None:
                libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a killed `zyfa` leaves no server behind

        with self.log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # its own process group, which stop() ends as a whole
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise ServerError(f"cannot start {self.command[0]}: {error.strerror}") from error
        if self._stopped.is_set():  # by another thread, which saw no process yet
            self.stop(in_order=False)
        deadline = time.monotonic() + self.startup_timeout_s
        with Client(self.url, timeout_s=5) as client:
            while not client.healthy():
                self.check_alive()
                if time.monotonic() > deadline:
                    raise ServerError(self.describe(f"was not healthy after {self.startup_timeout_s:g} s"))
                time.sleep(0.2)
        self.check_alive()  # /health may have been answered by another server that took the port first

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check_alive(self) -> None:
        """Raises ServerError with the last log lines when the server has ended."""
        process = self._process
        if process is None:
            raise ServerError("the server was stopped")
        code = process.poll()
        if code is not None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ServerError(self.describe(how))

    def failed(self, reason: str) -> ServerError:
        """The error for a failed request: that the server died, if it did (it may take a moment), else `reason`."""
        try:
            if self._process is not None:
                self._process.wait(timeout=3)
            self.check_alive()
        except subprocess.TimeoutExpired:
            pass
        except ServerError as error:
            return error
        return ServerError(self.describe(f"failed: {reason}"))

    def describe(self, what: str) -> str:
        shown = "\n".join(f"  | {line}" for line in self.tail()) or "  | (its log is empty)"
        first = first_exception(self.log_text())
        cause = f"\n  first error in its log: {first}" if first else ""
        return f"the server {what}{cause}\n  command: {self.shell_line()}\n  last lines of {self.log}:\n{shown}"

    def shell_line(self) -> str:
        """The command with what its environment adds to the caller's, to be pasted into a shell."""
        added = [f"{k}={shlex.quote(v)}" for k, v in sorted(self.env.items()) if os.environ.get(k) != v]
        return " ".join([*added, shlex.join(self.command)])

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        return self.log_text()[-16000:].splitlines()[-lines:]

    def log_text(self) -> str:
        try:
            return ANSI.sub("", self.log.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ""

    def stop(self, in_order: bool = True) -> None:
        """Ends the server and waits for its whole process group, killing what does not end in time.

        From another thread it also ends a start that is under way, which then raises ServerError.

        in_order: only the API server is told, which ends its engine processes so that they write their counters.
        Otherwise all of them are told at once.
        """
        self._stopped.set()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if not in_order:
                _signal_group(process, signal.SIGTERM)
            elif process.poll() is None:
                process.terminate()
            _wait_for_group(process, GRACE_S if in_order else HURRIED_GRACE_S)
        finally:
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _wait_for_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        process.poll()  # reaps the leader; a zombie would keep the group alive
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)


def first_exception(log: str) -> str | None:
    """The first exception in a log: processes of vLLM die one after another, and the last lines only say that."""
    for line in log.splitlines():
        message = LOG_PREFIX.sub("", line)
        if EXCEPTION.match(message):
            return message
    return None


def attention_backend(log: str) -> str:
    """The attention backend that vLLM says it selected, from its log.

    vLLM's CPU platform selects CPU_ATTN without a word (0.32), so on that platform the absence of a line means it.
    """
    patterns = (
        r"Using (\S+) attention backend out of potential backends",
        r"Using (\S+) backend out of potential backends",
        r"Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) backend(?: \(selected via --attention-backend\))?\.",
    )
    for pattern in patterns:
        found = re.findall(pattern, log)
        if found:
            return str(found[-1].removeprefix("AttentionBackendEnum."))
    return "CPU_ATTN" if platform_of(log) == "cpu" else "unknown"


def platform_of(log: str) -> str:
    """"cpu", "cuda", "rocm" or "unknown", by lines that only that platform's code logs."""
    for platform, pattern in (
        ("cpu", r"cpu_worker\.py|cpu_model_runner\.py"),
        ("rocm", r"\brocm\.py:\d+|rocm_aiter"),
        ("cuda", r"\bcuda\.py:\d+|gpu_worker\.py|gpu_model_runner\.py"),
    ):
        if re.search(pattern, log):
            return platform
    return "unknown"
