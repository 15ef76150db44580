"""Generated code in its sandbox: honest programs pass, hostile ones score nothing and leave nothing behind."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from diversed.tasks import sandbox
from diversed.tasks.code import humaneval_program, mbpp_program
from diversed.tasks.sandbox import Outcome, Program, isolation, run_tests
from tasks.programs import HONEST, HOSTILE, SECRET, TESTS, WRITES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox's guarantees are Linux's")


def outcome(code: str, tests=TESTS, names=("f",), mode=None, **settings) -> Outcome:
    return run_tests([Program(code, tests, names)], mode=mode, **settings)[0]


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Fails where a test leaves a process, a file, or a changed environment."""
    marked, scratches, bystander = tmp_path / "marked", tmp_path / "scratches", tmp_path / f"answer-{SECRET}.txt"
    marked.mkdir()
    scratches.mkdir()
    bystander.write_text(SECRET)
    examiner = marked / "examiner.py"  # a path of its own in the command line tells this test's processes
    for file in sandbox.EXAMINER.parent.glob("*.py"):
        (marked / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(sandbox, "EXAMINER", examiner)
    monkeypatch.setattr(tempfile, "tempdir", str(scratches))
    before = surroundings()
    yield str(examiner)
    deadline = time.monotonic() + 2  # the kernel reaps at its own pace
    while (left := processes(str(examiner))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
    assert os.listdir(scratches) == []
    assert set(os.listdir(tmp_path)) == {"marked", "scratches", bystander.name}
    assert bystander.read_text() == SECRET
    assert surroundings() == before


def surroundings():
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    return environment, os.getcwd()


def processes(mark: str) -> list[str]:
    """Live processes of the machine with ``mark`` in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(mark in part for part in process.cmdline()):
                found.append(f"{process.pid} {process.cmdline()}")
    return found


def _described(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return "zombie" if process.status() == psutil.STATUS_ZOMBIE else f"{pid} {process.cmdline()}"
    return ""


@pytest.fixture(params=["namespaces", "seccomp"])
def mode(request):
    if request.param == "namespaces" and isolation() != "namespaces":
        pytest.skip("this kernel allows no namespaces here")
    return request.param


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name, mode):
    result = outcome(HONEST[name], mode=mode)
    assert result == Outcome(3, 3, "")
    assert result.passed
    assert result.fraction == 1.0


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_score_nothing_and_leave_nothing(name, mode, nothing_left):
    if mode == "seccomp" and name == "the answer in a file":
        pytest.skip("not held there, as the documentation says")
    if mode == "seccomp" and name == "a full disk":
        pytest.skip("only the size of a file is limited there")
    start = time.monotonic()
    # `sleep` adds its arguments up; leading zeros make a number that no other test's process has.
    number = f"{'0' * 40}{os.getpid()}{mode == 'seccomp':d}"
    result = outcome(HOSTILE[name].replace("MARK", repr(number)), mode=mode, seconds=0.5)
    assert result.held == 0, result
    assert not result.passed
    assert result.fraction == 0.0
    assert result.reason
    assert time.monotonic() - start < 15
    assert processes(number) == []


@pytest.mark.parametrize("name", ["the answer in a frame or in the heap", "the answer in memory"])
def test_the_hunters_for_answers_find_what_is_there(name):
    """Or else their failure above would mean nothing."""
    planted = "planted = 'f(2) ' + chr(61) * 2 + ' ' + str(int('40961') + 1)\n"
    assert outcome(planted + HOSTILE[name], mode="seccomp").held == 3


def test_files_outside_the_scratch_directory_cannot_be_written(nothing_left, tmp_path):
    if isolation() != "namespaces":
        pytest.skip("this kernel allows no namespaces here")
    places = [str(tmp_path), tempfile.gettempdir(), str(Path.home()), "/usr/lib", sys.prefix, "/dev/shm", "/", "/etc"]
    assert outcome(WRITES.format(places=places)).held == 0
    for place in places:
        assert not Path(place, "left-behind").exists()


def test_a_listening_socket_of_the_host_is_out_of_reach(nothing_left):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code = f"import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', {port}), 1)\n    return 40960 + x"
        assert outcome(code).held == 0


def test_a_program_that_is_right_in_part_gets_its_part():
    result = outcome("def f(x):\n    if x == 3: raise KeyError(x)\n    return 40960 + x")
    assert (result.held, result.total, result.passed) == (2, 3, False)
    assert "KeyError" in result.reason
    assert result.fraction == pytest.approx(2 / 3)


def test_time_runs_out_after_what_already_held_is_counted():
    result = outcome("def f(x):\n    while x == 9: pass\n    return 40960 + x", seconds=1)
    assert (result.held, result.total, result.reason) == (2, 3, "out of time")


@pytest.mark.parametrize(
    "value",
    ["None", "True", "-(10**50)", "1.5", "float('inf')", "'ä\\ud800'", "b'x'", "[1, (2, {3}), {4: [5]}]",
     "frozenset({1})",
     "1+2j", "range(3)", "int", "__import__('collections').Counter('aab')", "__import__('decimal').Decimal('1.10')",
     "__import__('fractions').Fraction(1, 3)", "__import__('datetime').datetime(2020, 1, 2)",
     "__import__('datetime').timedelta(3)", "__import__('collections').deque([1])",
     "__import__('collections').OrderedDict(a=1)"],
)  # fmt: skip
def test_values_cross_the_pipe_both_ways_as_they_are(value):
    tests = (f"v = {value}", "assert f(v) == v", "assert type(f(v)) is type(v)", "assert repr(f(v)) == repr(v)")
    assert outcome("def f(x):\n    return x", tests).passed
    assert not outcome("def f(x):\n    return [x]", tests).passed


def test_objects_of_the_program_can_be_built_and_handed_back_by_the_tests():
    code = "class Node:\n    def __init__(self, v):\n        self.v, self.next = v, None\n"
    code += "def f(n):\n    return n.v + (f(n.next) if n.next else 0)\ndef g():\n    yield from (1, 2)"
    tests = ("n = Node(1)\nn.next = Node(2)\nassert f(n) == 3", "assert n.next.v == 2", "assert list(g()) == [1, 2]")
    assert outcome(code, tests, ("Node", "f", "g")).passed


def test_the_names_of_the_tests_are_not_the_programs_to_replace():
    code = "def set(x):\n    return 0\ndef helper(x):\n    return 0\ndef f(x):\n    return 7"
    tests = ("assert set([f(1)]) == set([8])", "assert f(1) == helper(1)")
    result = run_tests([Program(code, tests, ("f",), setup="def helper(x):\n    return 8")], seconds=1)[0]
    assert result.held == 0


def test_a_test_that_asserts_nothing_is_not_passed():
    assert not outcome("def f(x):\n    return 1", ("f(1)",)).passed
    assert not outcome("def f(x):\n    return 1", ("assert True, 'always'",)).passed


def test_an_exception_outside_an_assertion_fails_the_test():
    result = outcome("def f(x):\n    raise ValueError('no')", ("assert 1 < 2", "y = f(1)\nassert y == 1"))
    assert (result.held, result.passed) == (1, False)
    assert result.reason == "ValueError: no"


def test_a_test_may_expect_an_exception():
    test = "try:\n    f(0)\n    ok = False\nexcept ValueError:\n    ok = True\nassert ok"
    assert outcome("def f(x):\n    raise ValueError", (test,)) == Outcome(1, 1, "")
    assert not outcome("def f(x):\n    raise KeyError", (test,)).passed


def test_programs_run_at_the_same_time_and_come_back_in_order():
    sleepy = "import time\ndef f(x):\n    time.sleep(0.5)\n    return 40960 + x"
    programs = [Program(sleepy if i % 2 else "", TESTS[:1], ("f",)) for i in range(8)]
    start = time.monotonic()
    results = run_tests(programs, seconds=5, workers=8)
    assert [o.passed for o in results] == [bool(i % 2) for i in range(8)]
    one_by_one = 4 * 0.5
    assert time.monotonic() - start < one_by_one + 1.5


def test_a_program_that_takes_every_process_it_may_leaves_others_theirs():
    greedy = (
        "import os, time\ndef f(x):\n    try:\n        while os.fork():\n            pass\n"
        "    except OSError:\n        pass\n    time.sleep(3)\n    return 0"
    )
    modest = (
        "import threading, time\ndef f(x):\n    for _ in range(40):\n        t = threading.Thread(target=time.sleep, "
        "args=(0.05,))\n        t.start(); t.join()\n    return 40960 + x"
    )
    outcomes = run_tests([Program(code, TESTS[:1], ("f",)) for code in (greedy, modest)] * 2, workers=4)
    assert [o.passed for o in outcomes] == [False, True] * 2, outcomes


FILTERED = """
import ctypes, fcntl, os, resource, sys
from diversed.tasks.sandbox import lockup
victim, libc = int(sys.argv[1]), ctypes.CDLL(None)
libc.prctl(lockup.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
lockup.forbid_calls(False)

def done(attempt, *arguments):
    try:
        return attempt(*arguments) not in (-1, None)
    except PermissionError:
        return False

reader, writer = os.pipe()
attempts = [
    (os.kill, victim, 9), (libc.sigqueue, victim, 9, None), (fcntl.fcntl, reader, lockup.F_SETOWN, victim),
    (fcntl.fcntl, reader, lockup.F_SETSIG, 9), (resource.prlimit, victim, resource.RLIMIT_CPU, (0, 0)),
]
assert not any([done(*attempt) for attempt in attempts])
os.set_blocking(reader, False)  # another fcntl
resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))  # another prlimit64
"""


def test_no_call_signals_another_process_of_the_user():
    """In a process that may do everything else: another user's would be out of reach anyway."""
    with subprocess.Popen(["sleep", "60"]) as victim:
        try:
            subprocess.run([sys.executable, "-c", FILTERED, str(victim.pid)], check=True)
            assert victim.poll() is None
        finally:
            victim.kill()


def test_mounts_below_the_python_installation_are_read_only_as_well(tmp_path, monkeypatch):
    inner = tmp_path / "lib" / "a mount"
    inner.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", inner], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        inner.chmod(0o777)
        visible = sandbox._visible()
        monkeypatch.setattr(sandbox, "_visible", lambda: [*visible, str(tmp_path / "lib")])
        code = (
            f"import os\nplace = {str(inner)!r}\ndef f(x):\n    assert os.path.isdir(place)\n"
            "    try: open(place + '/written', 'w').write('x')\n    except OSError: return 40960 + x\n    return 0"
        )
        assert outcome(code, mode="namespaces").passed
        assert not list(inner.iterdir())
    finally:
        subprocess.run(["umount", inner], check=True)


def test_a_sandbox_that_cannot_run_is_an_error_and_no_verdict(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match="says nothing about the program"):
        outcome(HONEST["plain"], mode="seccomp")


def test_a_failing_process_is_an_error_and_no_verdict(monkeypatch, tmp_path):
    broken = tmp_path / "examiner.py"
    broken.write_text("def main():\n    raise OSError('no more processes')")
    monkeypatch.setattr(sandbox, "EXAMINER", broken)
    with pytest.raises(RuntimeError, match="no more processes"):
        outcome(HONEST["plain"], mode="seccomp")


def test_a_verdict_without_the_nonce_is_refused(monkeypatch, tmp_path):
    forged = tmp_path / "examiner.py"
    forged.write_text(
        "def main():\n    import json, os, struct\n"
        "    d = json.dumps({'held': 3, 'total': 3, 'reason': ''}).encode()\n"
        "    os.write(1, struct.pack('!Q', len(d)) + d)"
    )
    monkeypatch.setattr(sandbox, "EXAMINER", forged)
    with pytest.raises(RuntimeError, match="the sandbox failed"):
        outcome(HONEST["plain"], mode="seccomp")


def test_a_stuck_examiner_is_killed_with_all_it_started(monkeypatch, nothing_left):
    monkeypatch.setattr(sandbox, "GRACE", 1.0)
    slow = "from decimal import Decimal\ndef f(x):\n    return Decimal('1E999999999')"
    result = outcome(
        slow, ("assert int(f(1)) == 1",), seconds=1
    )  # the conversion is one long step that no alarm interrupts
    assert not result.passed


def test_tests_that_are_no_python_are_the_callers_error():
    with pytest.raises(ValueError, match="a test is no Python"):
        outcome("", ("assert f(",))


def test_a_killed_caller_takes_its_sandboxes_along(nothing_left, tmp_path):
    code = (
        "import pathlib, sys, tempfile\nfrom diversed.tasks import sandbox\n"
        "sandbox.EXAMINER, tempfile.tempdir = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "programs = [sandbox.Program('import time\\ntime.sleep(1000)', ('assert f(1)',), ('f',))]\n"
        "sandbox.run_tests(programs, seconds=60, mode='seccomp')"
    )
    own = str(tmp_path / "scratches")
    caller = subprocess.Popen([sys.executable, "-c", code, nothing_left, own])
    deadline = time.monotonic() + 60
    while len(processes(nothing_left)) < 3 and time.monotonic() < deadline:  # caller, examiner, candidate
        time.sleep(0.05)
    assert len(processes(nothing_left)) == 3
    time.sleep(0.3)
    caller.kill()
    caller.wait()
    for folder in os.listdir(own):  # a killed process cannot remove its scratch directory
        os.rmdir(Path(own, folder))


def test_the_sandbox_can_be_used_from_a_thread():
    results: list[Outcome] = []
    thread = threading.Thread(target=lambda: results.append(outcome(HONEST["plain"])))
    thread.start()
    thread.join()
    assert results == [Outcome(3, 3, "")]


# --- reference solutions ----------------------------------------------------------------------------------------------

DATA = Path(os.environ.get("DIVERSED_DATA", "no-data"))


def stored(name: str) -> list[dict]:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is absent: set DIVERSED_DATA to the folder with the data sets")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_reference_solution_of_mbpp_passes_and_an_empty_one_does_not():
    rows = stored("mbpp/mbpp-full.jsonl.gz")
    assert len(rows) == 974
    results = run_tests([mbpp_program(row, row["code"]) for row in rows], seconds=20)
    assert [(row["task_id"], o) for row, o in zip(rows, results, strict=True) if not o.passed] == []
    results = run_tests([mbpp_program(row, "pass") for row in rows[:50]], seconds=20)
    assert sum(o.held for o in results) == 0


@pytest.mark.slow
def test_every_canonical_solution_of_humaneval_passes_and_a_bare_head_does_not():
    rows = [row | {"head": row["prompt"]} for row in stored("humaneval/humaneval.jsonl.gz")]
    assert len(rows) == 164
    results = run_tests([humaneval_program(row, row["prompt"] + row["canonical_solution"]) for row in rows], seconds=20)
    assert [(row["task_id"], o) for row, o in zip(rows, results, strict=True) if not o.passed] == []
    results = run_tests([humaneval_program(row, row["prompt"]) for row in rows], seconds=20)
    assert [row["task_id"] for row, o in zip(rows, results, strict=True) if o.passed] == []
