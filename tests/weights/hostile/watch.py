"""Opens files one by one, each in a process of its own, and says what happened to it.

Run as a program: a JSON line `[case, path, doors]` for each on stdin, one JSON line for it on
stdout, and it waits for the next. First it opens whole files of each kind, which have no name: that
imports every module, and what it evaluates (the annotations of our own commands) is no sign of
hostility. Each case then runs in a fork, with an audit hook, a limit of address space and a
deadline. Memory is the fork's peak (VmHWM) less what it has at its start; pages of shared libraries
that it touches again count too, some 20 MB.
"""

import contextlib
import gc
import io
import json
import logging
import os
import resource
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

DEADLINE = 10
"""Seconds of processor time for each opening of a file; twelve times as many by the clock, since a
busy machine is slower. Then the kernel ends the process."""
ADDRESSES = 2_000_000_000
"""Bytes of address space; with everything imported, 0.7 GB of it are taken on a CPU-only torch."""
WATCHED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen",
           "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.chmod", "os.link", "os.symlink",
           "os.truncate", "shutil.", "tempfile.", "socket.", "ctypes.", "pickle.find_class",
           "urllib.", "code.__new__")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PLACES = [Path(place) for place in (*sysconfig.get_paths().values(), *filter(None, sys.path))]
OURS = tuple({str(place) for path in _PLACES for place in (path, path.resolve())})


class Case(NamedTuple):
    """One hostile file.

    Attributes:
        files: name -> content, of all files of the folder; the first one is opened.
        message: a pattern that the refusal must match.
        accepted: why it is harmless to open it; nothing for a file that must be refused.
        unseen: whether `inspect`, which reads the header alone, need not see it.
    """

    files: Mapping[str, bytes]
    message: str = ""
    accepted: str = ""
    unseen: bool = False


def is_foreign(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audit event is one that reading numbers never needs."""
    if event == "open":
        return bool(arguments[2] & WRITING)
    if event == "exec":  # importing a module is one too
        return not str(getattr(arguments[0], "co_filename", "")).startswith((*OURS, "<frozen"))
    if event == "compile":  # `ast.literal_eval`, which says <unknown>, parses and runs nothing
        return arguments[1] != "<unknown>" and not str(arguments[1]).startswith(OURS)
    return event.startswith(WATCHED)


def memory(field: str) -> int:
    """Bytes: VmSize, VmRSS, or VmHWM, the peak of the latter."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def doors() -> dict[str, Callable[[str], tuple[str, str]]]:
    """Ways to open a file; each gives `accepted`, `refused` or `escaped`, and the message."""
    import torch

    import vitkit
    from vitkit import CheckpointError, cli

    logging.getLogger("vitkit").setLevel(logging.ERROR)  # what is guessed of a whole file

    def opened(read: Callable[..., Any], **how: Any) -> Callable[[str], tuple[str, str]]:
        def door(path: str) -> tuple[str, str]:
            try:
                read(path, **how)
            except CheckpointError as error:
                return "refused", str(error)
            except BaseException as error:  # noqa: BLE001 - whatever escapes is what is looked for
                return "escaped", f"{type(error).__name__}: {error}"
            return "accepted", ""

        return door

    def command(path: str) -> tuple[str, str]:
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            code = cli.run(["inspect", path])
        return {0: "accepted", 2: "refused"}.get(code, f"exit {code}"), printed.getvalue()

    return {
        "load": opened(vitkit.load),
        "inspect": opened(vitkit.inspect),
        "command": command,
        "trusted load": opened(vitkit.load, trust_pickle=True),
        "trusted inspect": opened(vitkit.inspect, trust_pickle=True),
        "unsafe": opened(torch.load, weights_only=False),
    }


def describe(event: str, arguments: tuple[Any, ...]) -> str:
    """An event in a line; code by the names and values in it."""
    code = arguments[0]
    if event == "exec" and hasattr(code, "co_names"):
        return f"exec {code.co_names} {code.co_consts}"
    return f"{event} {arguments!r}"[:300]


class Recorder:
    """An audit hook, which Python never takes off: `on` says whether it listens."""

    def __init__(self) -> None:
        self.on, self.events, self.known = False, list[str](), frozenset[str]()
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and is_foreign(event, arguments):
            line = describe(event, arguments)
            if line not in self.known:
                self.events.append(line)


def watched(
    path: str, named: list[str], ways: Mapping[str, Any], recorder: Recorder
) -> dict[str, Any]:
    """What one file did; runs in the fork."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    start, began = memory("VmRSS"), time.monotonic()
    recorder.on = True
    outcomes = {}
    for name in named:
        signal.setitimer(signal.ITIMER_PROF, DEADLINE)
        signal.alarm(12 * DEADLINE)
        outcomes[name] = ways[name](path)
    recorder.on = False
    return {"outcomes": outcomes, "events": recorder.events, "seconds": time.monotonic() - began,
            "growth": memory("VmHWM") - start}  # fmt: skip


def in_a_fork(path: str, *how: Any) -> dict[str, Any]:
    """`watched`, or by which signal the fork died."""
    out, into = os.pipe()
    gc.freeze()  # a collection in the fork would copy all memory that it goes through
    child = os.fork()
    if child == 0:
        os.close(out)
        result = json.dumps(watched(path, *how)).encode()
        with open(into, "wb") as pipe:
            pipe.write(result)
        os._exit(0)
    os.close(into)
    with open(out, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not text:
        return {"died": signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status)
                else f"exit {os.WEXITSTATUS(status)}"}  # fmt: skip
    return json.loads(text)


def results(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """One result for each case; whole files, which come before the others, have no name."""
    ways, recorder = doors(), Recorder()
    for line in lines:
        case, path, named = json.loads(line)
        if case:
            yield {"case": case, "path": path, **in_a_fork(path, named, ways, recorder)}
            continue
        for name in 2 * named:  # the second time without imports
            recorder.on = True
            kind, message = ways[name](path)
            recorder.on = False
            if kind not in ("accepted", "refused"):
                raise SystemExit(f"{path}: a whole file: {message}")
        recorder.known |= frozenset(recorder.events)
        recorder.events.clear()


if __name__ == "__main__":
    for result in results(iter(sys.stdin.readline, "")):
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
