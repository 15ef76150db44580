"""The process behind :mod:`diversed.tasks.sandbox`: run by path with ``python -I -S``, standard library alone.

It forks a *candidate*, locks it up, and lets it run the code under test. Only then does it read the tests. It runs
them itself; the names they may use of the code under test are stand-ins that send their arguments over a pipe and
get a value back. What is expected never enters the candidate's memory, and the verdict is not the candidate's to give.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import ctypes
import datetime
import decimal
import errno
import fractions
import json
import os
import platform
import re
import resource
import signal
import struct
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

LARGEST_MESSAGE = 16 << 20  # bytes
LARGEST_EXAMINER = 4 << 30  # bytes
LONGEST_ITERATOR = 100_000
FILE_BYTES, OPEN_FILES, PROCESSES, SCRATCH_BYTES = 8 << 20, 64, 16, 32 << 20

# --- values on the wire: JSON with a tag for what JSON does not have ------------------------------------------------

Refer = Callable[[Any], Any]


def encode(x: Any, refer: Refer) -> Any:
    """Plain values by value, anything else through ``refer``. Subclasses lose what makes them special: an ``int`` that
    claims to equal everything arrives as the ``int`` it is."""
    if x is None or x is True or x is False:
        return x
    if isinstance(x, str):
        return str.__str__(x)
    if isinstance(x, int):
        return ["int", hex(x)]
    if isinstance(x, float):
        return ["float", float.hex(x)]
    if isinstance(x, complex):
        return ["complex", float.hex(x.real), float.hex(x.imag)]
    if isinstance(x, bytes | bytearray):
        return [type(x).__name__ if type(x) in (bytes, bytearray) else "bytes", bytes(x).hex()]
    for kind in (list, tuple, set, frozenset, collections.deque):
        if isinstance(x, kind):
            return [kind.__name__, [encode(item, refer) for item in x]]
    for table in (collections.Counter, collections.OrderedDict, dict):
        if isinstance(x, table):
            return [table.__name__, [[encode(k, refer), encode(v, refer)] for k, v in dict.items(x)]]
    if isinstance(x, range):
        return ["range", x.start, x.stop, x.step]
    if isinstance(x, decimal.Decimal | fractions.Fraction):
        return [type(x).__name__, str(x)]
    if isinstance(x, datetime.datetime | datetime.date | datetime.time):
        return [type(x).__name__, x.isoformat()]
    if isinstance(x, datetime.timedelta):
        return ["timedelta", x.days, x.seconds, x.microseconds]
    if isinstance(x, type):
        name = x.__name__
        return ["builtin", name] if vars(builtins).get(name) is x else refer(x)
    if type(x).__module__ == "numpy" and getattr(x, "shape", None) == ():
        return encode(x.item(), refer)
    return refer(x)


def decode(x: Any, referred: Callable[[int], Any]) -> Any:
    if not isinstance(x, list):
        return x
    tag, *rest = x
    match tag:
        case "int":
            return int(rest[0], 16)
        case "float":
            return float.fromhex(rest[0])
        case "complex":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        case "bytes" | "bytearray":
            return (bytes if tag == "bytes" else bytearray).fromhex(rest[0])
        case "list" | "tuple" | "set" | "frozenset" | "deque":
            kind: Any = collections.deque if tag == "deque" else getattr(builtins, tag)
            return kind([decode(item, referred) for item in rest[0]])
        case "Counter" | "OrderedDict" | "dict":
            table: Any = dict if tag == "dict" else getattr(collections, tag)
            return table({decode(k, referred): decode(v, referred) for k, v in rest[0]})
        case "range":
            return range(*rest)
        case "Decimal":
            return decimal.Decimal(rest[0])
        case "Fraction":
            return fractions.Fraction(rest[0])
        case "datetime" | "date" | "time":
            return getattr(datetime, tag).fromisoformat(rest[0])
        case "timedelta":
            return datetime.timedelta(*rest)
        case "builtin":
            found = getattr(builtins, rest[0])
            if isinstance(found, type):
                return found
        case "reference":
            return referred(rest[0])
    raise ValueError(f"unknown tag {tag!r}")


def send(fd: int, message: Any) -> None:
    data = json.dumps(message).encode()
    data = struct.pack("!Q", len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int, largest: int | None = None) -> Any:
    size = struct.unpack("!Q", read_exactly(fd, 8))[0]
    if largest is not None and size > largest:
        raise EOFError(f"a message of {size} bytes")
    return json.loads(read_exactly(fd, size))


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError("the pipe is closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# --- the candidate: untrusted from the moment the code under test runs ----------------------------------------------


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


# --- locking the candidate up -----------------------------------------------------------------------------------------

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP = 1, 4, 8, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAP_DAC_READ_SEARCH = 1 << 2
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15  # have the kernel signal a process

# System calls a solution has no use for: network, other processes, mounts, kernel interfaces with a long history of
# holes, and memory that RLIMIT_AS does not count; and those that signal or leave the group. (audit architecture,
# pivot_root, clone, clone3, prctl, prlimit64, fcntl, those calls, the signalling ones)
ARCHITECTURES: dict[str, tuple[int, int, int, int, int, int, int, tuple[int, ...], tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E, 155, 56, 435, 157, 302, 72,
        (41, 101, 310, 311, 272, 308, 165, 166, 155, 161, 246, 320, 321, 298, 250, 248, 249, 425, 426, 427, 323, 424,
         438, 440, 175, 313, 176, 304, 319, 29, 68, 64, 240, 428, 429, 430, 431, 432, 442, 103, 169, 167, 168),
        (112, 109, 62, 200, 234, 129, 297),
    ),
    "aarch64": (
        0xC00000B7, 41, 220, 435, 167, 261, 25,
        (198, 117, 270, 271, 97, 268, 40, 39, 41, 51, 104, 294, 280, 241, 219, 217, 218, 425, 426, 427, 282, 424,
         438, 440, 105, 273, 106, 265, 279, 194, 186, 190, 180, 428, 429, 430, 431, 432, 442, 116, 142, 224, 225),
        (157, 154, 129, 130, 131, 138, 240),
    ),
}  # fmt: skip


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    checked(libc().unshare(flags), "unshare")


def separate_namespaces() -> bool:
    """Give the processes forked from here on namespaces of their own. True where a user namespace was needed."""
    others = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    try:
        unshare(others)  # with CAP_SYS_ADMIN
        return False
    except OSError:
        user, group = os.geteuid(), os.getegid()
        unshare(CLONE_NEWUSER | others)
        for name, line in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
        return True


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    result = libc().mount(*((x.encode() if x is not None else None) for x in (source, target, kind)),
                          ctypes.c_ulong(flags), data.encode() if data else None)  # fmt: skip
    checked(result, f"mount {target}")


def mounts_below(path: str) -> list[str]:
    """The mount points at ``path`` and below it."""
    with open("/proc/self/mountinfo") as file:
        escaped = [line.split(" ")[4] for line in file]
    points = [re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), point) for point in escaped]
    return [p for p in dict.fromkeys(points) if p == path or p.startswith(path + "/")]


def small_root(root: str, visible: list[str]) -> None:
    """Replace the file system by a small one in memory: the Python installation, read-only, and ``/scratch``. It is
    gone when the last process in it is."""
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("scratch", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={SCRATCH_BYTES},nr_inodes=4096,mode=755")
    for path in visible:
        inside = root + path
        if os.path.lexists(inside) or not os.path.exists(path):
            continue
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path) and os.path.isdir(path):
            os.symlink(os.readlink(path), inside)  # /lib -> usr/lib
            continue
        if os.path.isdir(path):
            os.mkdir(inside)
        else:
            os.close(os.open(inside, os.O_CREAT | os.O_WRONLY))
        mount(path, inside, None, MS_BIND | MS_REC)
        nodev = 0 if path.startswith("/dev/") else MS_NODEV
        for place in mounts_below(inside):  # binding took those below along, and each has flags of its own
            # A flag the outer mount has may not be dropped in a user namespace; statvfs and mount agree on these bits.
            kept = os.statvfs(place).f_flag & (2 | 4 | 8 | 1024 | 2048)
            relatime = (1 << 21) if os.statvfs(place).f_flag & 4096 else 0
            mount(path, place, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | nodev | kept | relatime)
    os.mkdir(root + "/scratch")
    os.chmod(root + "/scratch", 0o1777)
    os.chdir(root)
    here = ARCHITECTURES.get(platform.machine())
    if here is None:
        os.chroot(".")
    else:
        checked(libc().syscall(ctypes.c_long(here[1]), b".", b"."), "pivot_root")
        checked(libc().umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/scratch")


def drop_privileges(namespaces: bool, user_namespace: bool, examiner: int) -> None:
    """Become nobody: as root, a user of this sandbox's own (so that RLIMIT_NPROC counts its processes alone), known by
    its examiner's process id, for in a namespace of its own each candidate has the same one; then without
    capabilities, and no way to regain any. Without a small root, root's code keeps reading what root can: Python may
    be installed where nobody else can."""
    keeps = 0
    if os.geteuid() == 0 and not user_namespace:
        if sys.platform == "linux" and not namespaces:
            keeps = CAP_DAC_READ_SEARCH
            checked(libc().prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "keepcaps")
        os.setgroups([])
        for user in ((1 << 30) + examiner % (1 << 22) + int(time.time()) % 64 * (1 << 22), 65534):
            try:
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                break
            except OSError as error:  # a container may map few ids
                if user == 65534:
                    raise OSError(error.errno, f"setuid: {error.strerror}") from error
    if sys.platform == "linux":
        checked(libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        header = struct.pack("Ii", 0x20080522, 0)
        checked(libc().capset(header, struct.pack("6I", keeps, keeps, 0, 0, 0, 0)), "capset")


def tasks_of_user() -> int:
    """Processes and threads that this user runs, which RLIMIT_NPROC counts."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                found += len(os.listdir(f"/proc/{name}/task"))
    return found


def limit(seconds: int, memory: int, processes: int) -> None:
    limits = {
        "RLIMIT_CPU": seconds, "RLIMIT_AS": memory, "RLIMIT_FSIZE": FILE_BYTES, "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_NPROC": processes, "RLIMIT_CORE": 0, "RLIMIT_MSGQUEUE": 0, "RLIMIT_MEMLOCK": 0,
    }  # fmt: skip
    for name, value in limits.items():
        if hasattr(resource, name):
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with contextlib.suppress(ValueError, OSError) if sys.platform != "linux" else contextlib.nullcontext():
                resource.setrlimit(kind, (value, value))


def forbid_calls(namespaces: bool) -> None:
    """A seccomp filter: forbidden system calls fail with EPERM. Without a namespace of processes also signals, limits
    of others (a CPU limit of 0 kills) and new sessions, so that neither the examiner nor other processes can be reached
    and no child can get away."""
    audit, _, clone, clone3, prctl, prlimit, fcntl, calls, signals = ARCHITECTURES[platform.machine()]
    allow, deny, missing, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    program = [
        (load, 0, 0, 4), (equal, 1, 0, audit), (end, 0, 0, kill),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (end, 0, 0, deny),  # the x32 ABI's numbers
    ]  # fmt: skip
    for number in calls + (() if namespaces else signals):
        program += [(equal, 0, 1, number), (end, 0, 0, deny)]
    if not namespaces:
        program += [
            (equal, 0, 4, prlimit), (load, 0, 0, 16), (equal, 0, 1, 0), (end, 0, 0, allow), (end, 0, 0, deny),
            (equal, 0, 6, fcntl), (load, 0, 0, 24),
            *((equal, 3 - i, 0, number) for i, number in enumerate((F_SETOWN, F_SETSIG, F_SETOWN_EX))),
            (end, 0, 0, allow), (end, 0, 0, deny),
        ]  # fmt: skip
    program += [
        (equal, 0, 1, clone3), (end, 0, 0, missing),  # its flags lie in memory; C libraries then use clone
        (equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 5, 0x7E020000), (end, 0, 0, deny),  # new namespaces
        (equal, 0, 3, prctl), (load, 0, 0, 16), (equal, 0, 1, PR_SET_PDEATHSIG), (end, 0, 0, deny),
        (end, 0, 0, allow),
    ]  # fmt: skip
    packed = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    checked(libc().prctl(PR_SET_SECCOMP, 2, filters, 0, 0), "seccomp")


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


# --- the examination --------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    main()
