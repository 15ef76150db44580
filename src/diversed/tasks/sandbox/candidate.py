"""The process that runs the code under test: forked, locked up, and untrusted from the moment that code runs."""

from __future__ import annotations

import os
import platform
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from diversed.tasks.sandbox.lockup import (
    ARCHITECTURES,
    PR_SET_PDEATHSIG,
    PROCESSES,
    checked,
    drop_privileges,
    forbid_calls,
    libc,
    limit,
    separate_namespaces,
    small_root,
    tasks_of_user,
)
from diversed.tasks.sandbox.wire import LARGEST_MESSAGE, decode, encode, receive, send

LONGEST_ITERATOR = 100_000


def start_candidate(job: dict[str, Any]) -> tuple[int, int, int]:
    """Fork it. Returns its process id, the pipe for requests and that for replies.

    Raises:
        RuntimeError: it could not be locked up.
    """
    isolation: str = job["isolation"]
    user_namespace = isolation == "namespaces" and separate_namespaces()
    to_read, requests = os.pipe()
    replies, to_write = os.pipe()
    examiner = os.getpid()
    pid = os.fork()
    reply_fd = to_write
    if pid:
        os.close(to_read)
        os.close(to_write)
        first = receive(replies, LARGEST_MESSAGE)
        if first != "ready":
            raise RuntimeError(str(first))
        return pid, requests, replies
    try:
        nothing = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        os.dup2(to_read, 200)
        os.dup2(to_write, 201)
        os.closerange(3, 200)
        os.closerange(202, 65536)
        os.dup2(200, 3)
        os.dup2(201, 4)
        reply_fd = 4
        os.closerange(200, 202)
        os.umask(0o022)  # as another user it must be able to read what is made below
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        if isolation == "namespaces":
            small_root(job["scratch"], job["visible"])
            libc().sethostname(b"sandbox", 7)
        else:
            os.chdir(job["scratch"])
        # Elsewhere the processes are those of a user or a namespace of their own, and the limit counts them alone.
        shared = isolation != "namespaces" and os.geteuid() != 0
        limit(job["seconds"], job["memory"], PROCESSES + (tasks_of_user() if shared else 0))
        drop_privileges(isolation == "namespaces", user_namespace, examiner)
        if sys.platform == "linux":
            checked(libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
            if isolation != "limits" and platform.machine() in ARCHITECTURES:
                forbid_calls(isolation == "namespaces")
        os.environ.clear()
        # Libraries that start a thread for every core would run into the limit on processes.
        os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        sys.path += job["packages"]
        send(4, "ready")
    except BaseException as error:
        send(reply_fd, f"{type(error).__name__}: {error}")
        os._exit(1)
    try:
        candidate(job["code"], 3, 4)
    finally:
        os._exit(0)


def candidate(code: str, requests: int, replies: int) -> NoReturn:
    """Run the code, then answer calls until the pipe closes."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    objects: list[Any] = []

    def refer(x: Any) -> Any:
        objects.append(x)  # also keeps it alive
        return ["reference", len(objects) - 1]

    def answer(work: Callable[..., Any], *arguments: Any) -> None:
        try:
            reply = ["value", encode(work(*arguments), refer)]
        except BaseException as error:
            try:
                reply = ["raised", type(error).__name__, str(error)[:500]]
            except BaseException:
                reply = ["raised", "Exception", ""]
        send(replies, reply)

    answer(lambda: exec(compile(code, "solution.py", "exec"), module.__dict__))
    while True:
        action, target, *rest = receive(requests)
        answer(perform, action, target, rest, module, objects)


def perform(action: str, target: Any, rest: list[Any], module: types.ModuleType, objects: list[Any]) -> Any:
    thing = getattr(module, target) if isinstance(target, str) else objects[target]
    arguments = [decode(x, objects.__getitem__) for x in rest]
    match action:
        case "call":
            return thing(*arguments[0], **arguments[1])
        case "get":
            return getattr(thing, arguments[0])
        case "set":
            return setattr(thing, arguments[0], arguments[1])
        case "iterate":
            return [x for _, x in zip(range(LONGEST_ITERATOR), thing, strict=False)]
    raise ValueError(action)
