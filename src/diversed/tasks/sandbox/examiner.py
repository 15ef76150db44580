"""The trusted process behind :mod:`diversed.tasks.sandbox`: run with ``python -I -S``, standard library alone.

It forks a *candidate*, locks it up, and lets it run the code under test. Only then does it read the tests. It runs
them itself; the names they may use of the code under test are stand-ins that send their arguments over a pipe and
get a value back. What is expected never enters the candidate's memory, and the verdict is not the candidate's to give.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from diversed.tasks.sandbox.candidate import start_candidate
from diversed.tasks.sandbox.lockup import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, checked, libc
from diversed.tasks.sandbox.wire import LARGEST_MESSAGE, decode, encode, receive, send

LARGEST_EXAMINER = 4 << 30  # bytes


class TimeUp(BaseException):
    """Not an Exception: a test must not catch it."""


class Examination:
    """The state of one examination: the pipes, and the count of assertions."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies
        self.held = self.total = 0
        self.reason = ""

    def ask(self, *message: Any) -> Any:
        try:
            if message:
                send(self.requests, message)
            reply = receive(self.replies, LARGEST_MESSAGE)
            kind, *rest = reply
            if kind == "value":
                return decode(rest[0], lambda number: Remote(self, number))
            name, text = rest
        except TimeUp:
            raise
        except Exception as error:  # no more process, or it wrote nonsense on its pipe
            self.reason = self.reason or f"no answer ({type(error).__name__}: {error})"
            raise RuntimeError("no answer") from None
        self.reason = self.reason or f"{name}: {text}"
        known = getattr(builtins, str(name), None)
        if isinstance(known, type) and issubclass(known, Exception):
            raise known(text)
        raise RuntimeError(text)

    def check(self, condition: Callable[[], Any]) -> None:
        """What an assert statement becomes."""
        self.total += 1
        try:
            right = bool(condition())
        except Exception as error:
            right = False
            self.reason = self.reason or f"{type(error).__name__}: {error}"[:500]
        self.held += right
        if not right:
            self.reason = self.reason or f"assertion {self.total} does not hold"


class Remote:
    """A thing of the candidate's that is no plain value. It equals itself alone."""

    def __init__(self, examination: Examination, target: str | int) -> None:
        self.__dict__.update(_examination=examination, _target=target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("iterate"))

    def _ask(self, action: str, *arguments: Any) -> Any:
        return self.__dict__["_examination"].ask(
            action, self.__dict__["_target"], *(encode(x, refer_remote) for x in arguments)
        )


def refer_remote(x: Any) -> Any:
    if isinstance(x, Remote):
        target = x.__dict__["_target"]
        if isinstance(target, int):
            return ["reference", target]
    raise TypeError(f"a {type(x).__name__} cannot be sent to the code under test")


class Counted(ast.NodeTransformer):
    """Turns ``assert x`` into ``__check__(lambda: x)``, and drops assertions of a constant, which test nothing."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.copy_location(ast.Pass(), node)
        empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        call = ast.Call(ast.Name("__check__", ast.Load()), [ast.Lambda(empty, node.test)], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node))


def assertions(tree: ast.AST) -> int:
    return sum(isinstance(n, ast.Assert) and not isinstance(n.test, ast.Constant) for n in ast.walk(tree))


def examine(examination: Examination, job: dict[str, Any]) -> None:
    """Run the tests. Leaves the result in ``examination``; ``total`` ends at no less than the assertions written."""
    stand_ins = {name: Remote(examination, name) for name in job["names"]}
    namespace: dict[str, Any] = {"__name__": "tests", "__check__": examination.check, **stand_ins}
    exec(compile(job["setup"], "setup", "exec"), namespace)
    namespace.update(stand_ins)  # the setup may define them too, as HumanEval's prompts do
    for test in job["trees"]:
        try:
            exec(compile(Counted().visit(test), "test", "exec"), namespace)
        except Exception as error:
            examination.total += 1  # what stopped the test counts as an assertion that does not hold
            examination.reason = examination.reason or f"{type(error).__name__}: {error}"[:500]


def end(pid: int, isolation: str) -> resource.struct_rusage:
    """Kill the candidate and all it started; returns what it used."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    usage = os.wait4(pid, 0)[2]  # in a namespace of processes, returns when the last of them is gone
    if isolation == "namespaces" or sys.platform != "linux":
        return usage
    while True:  # orphans become children of this process, their reaper
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for child in file.read().split():
                    os.kill(int(child), signal.SIGKILL)
            os.wait()
        except ChildProcessError:
            return usage


def main() -> None:
    verdicts = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 1)
    job = receive(0)
    isolation = job["isolation"]
    try:
        if sys.platform == "linux":
            for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, 9)):
                if option == PR_SET_DUMPABLE and isolation == "namespaces":
                    continue  # it would own /proc/self as root, and uid_map could not be written
                checked(libc().prctl(option, value, 0, 0, 0), "prctl")
        pid, requests, replies = start_candidate(job)
        if sys.platform == "linux":
            checked(libc().prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    except Exception as error:
        send(verdicts, {"crash": f"{type(error).__name__}: {error}"})
        return
    job = receive(0)  # the tests: read after the fork
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # a value may be small on the pipe and large in memory: a range
        resource.setrlimit(resource.RLIMIT_AS, (LARGEST_EXAMINER, LARGEST_EXAMINER))
    examination = Examination(requests, replies)

    def alarm(*_: Any) -> None:
        raise TimeUp

    signal.signal(signal.SIGALRM, alarm)
    verdict: dict[str, Any] = {"nonce": job["nonce"]}
    written = 0
    try:
        job["trees"] = [ast.parse(test) for test in job["tests"]]
        written = sum(map(assertions, job["trees"]))
        signal.setitimer(signal.ITIMER_REAL, job["wall"])
        examination.ask()  # the code itself ran
        examine(examination, job)
    except TimeUp:
        examination.reason = "out of time"
        examination.total = max(examination.total, examination.held + 1)
    except Exception as error:
        examination.reason = examination.reason or f"{type(error).__name__}: {error}"[:500]
        examination.total = max(examination.total, examination.held + 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        usage = end(pid, isolation)
    # The limit counts ticks and this counts time: on a busy machine they are a fifth apart.
    if examination.held < examination.total and usage.ru_utime + usage.ru_stime >= 0.75 * job["seconds"]:
        examination.reason = "out of time"
    total = max(examination.total, written)
    reason = examination.reason if examination.held < total else ""  # an exception may be what a test expects
    verdict.update(held=examination.held, total=total, reason=reason)
    send(verdicts, verdict)
