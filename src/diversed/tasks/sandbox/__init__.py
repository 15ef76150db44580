"""Runs programs that a model wrote, against tests it must not see.

**How a verdict comes about.** A trusted process (``examiner``) forks a locked-up one (``candidate``, ``lockup``) that
runs the code under test, and reads the tests only afterwards. It runs the tests itself; a call of the tested function
sends the arguments over a pipe (``wire``) and gets a plain value back. So the code under test sees arguments, never
what is expected; it holds no descriptor but its two pipes; and patching ``assert``, builtins or ``unittest``, exiting,
printing, or writing to the pipes changes nothing but its own answers. A value crosses the pipe as what it plainly is:
an ``int`` subclass that claims to equal everything arrives as an ``int``.

**What holds** depends on what the kernel allows; :func:`isolation` says which of these it is.

``namespaces`` (Linux as root, or with unprivileged user namespaces). The code has its own process, network, IPC and
mount namespaces: no network, no other process to see or signal, a file system in memory with the Python installation
read-only and a scratch directory, gone with the process; when the examination ends, the kernel kills everything
started from it, daemons too. It runs without capabilities, as a user of its own where started by root, and a seccomp
filter refuses sockets, ptrace, mounts, new namespaces and other calls a solution has no use for (x86-64 and ARM64).

``seccomp`` (Linux elsewhere, as in a container that forbids namespaces). The filter also refuses signals and new
sessions, and orphans are found and killed. Not held: the code can *read* whatever the user can read, so keep answers
and secrets out of its reach, and write files where the user can (started by root it becomes
another user first, who can still read everything). Where ``kernel.yama.ptrace_scope`` is 0, those files include the
memory of the user's other processes.

``limits`` (other systems). Resource limits and the separation of verdicts only: no protection from hostile code.

Everywhere: an environment of two variables that keep libraries to one thread, no standard input, limits on CPU time (of
each process), wall time, address space (of each process; macOS does not enforce it), file size (8 MiB), open files (64)
and processes (16; by RLIMIT_NPROC, which does not bind root, hence the other user, and counts all that an ordinary user
runs, hence 16 more than those). A kernel flaw defeats all of it; use a virtual machine against that.

**What tests cannot do**: see changes the code makes to its arguments in place, or pass functions to it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import signal
import site
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMINER = Path(__file__).with_name("examiner.py")
# -I -S leave everybody else's code out, this package's own but for the sandbox's files included.
START = (
    "import sys, types; from os.path import dirname; package = types.ModuleType('diversed.tasks.sandbox'); "
    "package.__path__ = [dirname(sys.argv[1])]; sys.modules[package.__name__] = package; "
    "from diversed.tasks.sandbox.examiner import main; main()"
)
GRACE = 20.0  # seconds beyond the wall time for start and end, before the whole group is killed


@dataclass(frozen=True)
class Program:
    """Code under test, and the trusted code that tests it."""

    code: str
    tests: tuple[str, ...]  #: Python with assert statements; each is run to its end or its first exception
    names: tuple[str, ...]  #: what the tests use of ``code``; all else they use is their own
    setup: str = ""  #: trusted code that runs before the tests, in their namespace


@dataclass(frozen=True)
class Outcome:
    held: int  #: assertions that held
    total: int  #: assertions that were run or, where an end came early, that are written in the tests
    reason: str  #: why the first failure failed; empty where none did

    @property
    def passed(self) -> bool:
        return 0 < self.total == self.held

    @property
    def fraction(self) -> float:
        return self.held / self.total if self.total else 0.0


def run_tests(
    programs: Sequence[Program],
    *,
    seconds: float = 5.0,
    memory_mb: int = 1024,
    workers: int | None = None,
    mode: str | None = None,
) -> list[Outcome]:
    """Run each program's tests in a sandbox of its own, ``workers`` at a time.

    Args:
        programs: what to run.
        seconds: CPU time of a program, rounded up; the wall time is three times that.
        memory_mb: address space of each of its processes, MiB.
        workers: how many at a time (default: a CPU each, of those this process may use).
        mode: how to lock it up (default: :func:`isolation`).

    Returns:
        An outcome per program, in order.

    Raises:
        RuntimeError: the sandbox itself failed (no process, no scratch directory). A program's own failure of any
            kind is an outcome.
        ValueError: a test or the setup is no Python.
    """
    if not programs:
        return []
    for program in programs:
        for text in (program.setup, *program.tests):
            try:
                compile(text, "test", "exec")
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"programs: a test is no Python ({error}): {text[:200]!r}") from error
    chosen = mode or isolation()
    with ThreadPoolExecutor(max(1, min(len(programs), workers or usable_cpus()))) as pool:
        return list(pool.map(lambda program: _run(program, seconds, memory_mb, chosen), programs))


def usable_cpus() -> int:
    """CPUs that this process's programs can count on: more of them at a time would run each other out of wall time."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # a container's quota, "max 100000" where it has none
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        own = min(own, int(quota) // int(period))
    return max(1, own // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # shared with the ranks of a training run


@functools.cache
def isolation() -> str:
    """``namespaces``, ``seccomp`` or ``limits``: the strongest that works here, with a warning where it is weaker."""
    # The import shows that the Python installation can be read from inside, as another user where started by root.
    probe = Program("def f(x):\n    import statistics\n    return statistics.mean([x])", ("assert f(1) == 1",), ("f",))
    failures: list[str] = []
    mode: str
    for mode in (*(("namespaces", "seccomp") if sys.platform == "linux" else ()), "limits"):
        try:
            outcome = _run(probe, 10.0, 1024, mode)
        except RuntimeError as error:
            failures.append(f"{mode}: {error}")
            continue
        if outcome.passed:
            break
        failures.append(f"{mode}: {outcome.reason}")
    else:
        raise RuntimeError(f"the sandbox cannot run here: {'; '.join(failures)}")
    if mode != "namespaces":
        warnings.warn(
            f"generated code runs with weaker isolation ({mode}): {'; '.join(failures) or 'this is no Linux'}. "
            "See diversed.tasks.sandbox for what that means; run it in a container or a virtual machine",
            stacklevel=2,
        )
    return mode


def _visible() -> list[str]:
    """What the code can see of the file system: Python and the libraries it needs."""
    system = ["/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/alternatives"]
    pythons = [sys.base_prefix, sys.base_exec_prefix, sys.prefix]
    found = {os.path.realpath(p) for p in pythons} | set(pythons)
    # The root itself must never be shown; what lies below something visible already is.
    extra = [p for p in sorted(found) if p not in ("/", "/usr") and not p.startswith("/usr/")]
    return [*system, *extra, "/dev/null", "/dev/urandom"]


def _packages() -> list[str]:
    """Installed packages, as paths: without running what their ``.pth`` files ask for."""
    return [p for p in (*site.getsitepackages(),) if os.path.isdir(p)]


def _run(program: Program, seconds: float, memory_mb: int, mode: str) -> Outcome:
    nonce, whole = secrets.token_hex(16), math.ceil(seconds)
    try:
        with tempfile.TemporaryDirectory(prefix="diversed-sandbox-", ignore_cleanup_errors=True) as scratch:
            if mode != "namespaces" and os.geteuid() == 0:
                os.chmod(scratch, 0o1777)  # the code runs as another user
            jobs: list[dict[str, Any]] = [
                {
                    "isolation": mode, "scratch": scratch, "visible": _visible(), "packages": _packages(),
                    "seconds": whole, "memory": memory_mb << 20, "code": program.code,
                },
                {
                    "nonce": nonce, "tests": program.tests, "names": program.names, "setup": program.setup,
                    "seconds": whole, "wall": 3 * seconds,
                },
            ]  # fmt: skip
            return _verdict(b"".join(map(_framed, jobs)), nonce, 3 * seconds + GRACE, scratch)
    except OSError as error:
        raise RuntimeError(f"the sandbox cannot run: {error}; this says nothing about the program") from error


def _verdict(jobs: bytes, nonce: str, timeout: float, scratch: str) -> Outcome:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", START, str(EXAMINER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(jobs, timeout=timeout)
    except subprocess.TimeoutExpired:  # a value so odd that comparing it takes for ever
        return Outcome(0, 1, "out of time")
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        verdict = json.loads(output[8:]) if struct.unpack("!Q", output[:8])[0] == len(output) - 8 else {}
    except (struct.error, ValueError):
        verdict = {}
    if verdict.get("nonce") != nonce:
        reason = verdict.get("crash") or errors.decode(errors="replace").strip()[-500:] or f"exit {process.returncode}"
        raise RuntimeError(f"the sandbox failed ({reason}); this says nothing about the program")
    return Outcome(verdict["held"], verdict["total"], verdict["reason"])


def _framed(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack("!Q", len(data)) + data
