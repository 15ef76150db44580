"""Locking a process up: namespaces, a small file system, another user, limits, forbidden system calls."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import resource
import struct
import sys
import time
from typing import Any

FILE_BYTES, OPEN_FILES, PROCESSES, SCRATCH_BYTES = 8 << 20, 64, 16, 32 << 20

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
