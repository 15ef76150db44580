"""Programs for the sandbox: honest ones, and ones that try to pass without knowing the function."""

from __future__ import annotations

TESTS = ("assert f(2) == 40962", "assert f(3) == 40963", "assert f(9) == 40969")
SECRET = "40962"

HONEST = {
    "plain": "def f(x):\n    return 40960 + x",
    "through a helper, a class and an import": (
        "import math\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n    def y(self):\n"
        "        return math.floor(40960.5) + self.x\ndef f(x):\n    return A(x).y()"
    ),
    "prints a great deal": "def f(x):\n    print('x' * 1000000)\n    return 40960 + x",
    "a lambda and state between calls": "seen = {}\nf = lambda x: seen.setdefault(x, 40960 + x)",
    "a guarded main is not run": (
        "def f(x):\n    return 40960 + x\nif __name__ == '__main__':\n    raise SystemExit(1)"
    ),
    "writes and reads its scratch": (
        "def f(x):\n    open('a.txt', 'w').write(str(x))\n    return 40960 + int(open('a.txt').read())"
    ),
    "a thread": (
        "import threading\ndef f(x):\n    out = []\n    t = threading.Thread(target=lambda: out.append(40960 + x))\n"
        "    t.start(); t.join()\n    return out[0]"
    ),
}

# Each tries to pass without knowing the function. F defines one that is wrong.
F = "\ndef f(x):\n    return 0\n"
HOSTILE = {
    "exit code 0": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "hard exit in the call": "import os\ndef f(x):\n    os._exit(0)",
    "SystemExit in the call": "def f(x):\n    raise SystemExit(0)",
    "claims to have passed": "print('OK'); print('{\"held\": 3, \"total\": 3}')" + F,
    "a value equal to everything": (
        "class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x):\n    return Yes()"
    ),
    "an int equal to everything": (
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "    def __reduce__(self): return (eval, ('print(1)',))\ndef f(x):\n    return Yes(1)"
    ),
    "patched builtins": (
        "import builtins, unittest\nbuiltins.AssertionError = type('E', (BaseException,), {})\n"
        "unittest.TestCase.assertEqual = lambda *a: None\nbuiltins.bool = lambda x: True\n"
        "builtins.__dict__['len'] = int"
        + F
    ),
    "patched exec and json": "import json, builtins\njson.loads = lambda s: 40962\n"
    "builtins.exec = lambda *a: None" + F,
    "verdicts on every descriptor": (
        "import os, json, struct\nd = json.dumps({'held': 3, 'total': 3, 'reason': '', 'nonce': ''}).encode()\n"
        "def f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, struct.pack('!Q', len(d)) + d)\n"
        "        except OSError: pass\n    return 0"
    ),
    "a crash report": (
        "import os, json, struct\nd = json.dumps('ready').encode()\n"
        "def f(x):\n    os.write(4, struct.pack('!Q', len(d)) + d)\n    os.write(4, b'x' * 100)\n    os._exit(1)"
    ),
    "a huge message": "import os, struct\ndef f(x):\n    os.write(4, struct.pack('!Q', 1 << 62))\n    return 0",
    "a huge value": "def f(x):\n    return 'x' * (1 << 28)",
    "a small message, large in memory": "def f(x):\n    return range(1 << 60)",
    "kills its parent": (
        "import os, signal\ndef f(x):\n    for p in (os.getppid(), -1, 1):\n        try: os.kill(p, signal.SIGKILL)\n"
        "        except OSError: pass\n    return 0"
    ),
    "the answer in a frame or in the heap": (
        "import gc, re, sys\ndef f(x):\n    frame = sys._getframe()\n    texts = []\n    while frame:\n"
        "        texts += [repr(frame.f_globals), repr(frame.f_locals)]\n        frame = frame.f_back\n"
        "    texts += [repr(o)[:10000] for o in gc.get_objects() if o is not texts]\n"
        "    return next((40960 + x for t in texts if re.search(r'== 4096[2]', t)), 0)"
    ),
    "the answer in memory": (
        "import ctypes, re\ndef f(x):\n    try: lines = open('/proc/self/maps').read().splitlines()\n"
        "    except OSError: lines = []\n    for line in lines:\n"
        "        a, b = (int(v, 16) for v in line.split()[0].split('-'))\n"
        "        if ' rw' in line and b - a < 1 << 26 and '[stack' not in line:\n"
        "            if re.search(rb'== 4096[2]', ctypes.string_at(a, b - a)): return 40960 + x\n    return 0"
    ),
    "the answer in a file": (
        "import os\ndef f(x):\n    for top, _, names in os.walk('/'):\n        for n in names:\n"
        "            if n == 'answer-40962.txt': return 40960 + x\n"
        "    return 0"
    ),
    "the answer in the environment or arguments": (
        "import os, sys\ndef f(x):\n    text = repr(dict(os.environ)) + repr(sys.argv)\n"
        "    known = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}\n"
        "    return 40960 + x if dict(os.environ) != known or '4096' + '2' in text else 0"
    ),
    "the answer of another process": (
        "import os\ndef f(x):\n    for p in os.listdir('/proc') if os.path.isdir('/proc') else []:\n"
        "        if p.isdigit() and int(p) != os.getpid():\n"
        "            try:\n                open(f'/proc/{p}/mem', 'rb'); open(f'/proc/{p}/environ').read()\n"
        "                return 40960 + x\n"
        "            except OSError: pass\n    return 0"
    ),
    "ptrace": (
        "import ctypes, os\ndef f(x):\n    c = ctypes.CDLL(None)\n"
        "    return 40960 + x if c.ptrace(16, os.getppid() or 1, 0, 0) == 0 else 0"
    ),
    "sockets": (
        "import socket\ndef f(x):\n    for kind in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):\n"
        "        try:\n            socket.socket(kind, socket.SOCK_STREAM); return 40960 + x\n"
        "        except OSError: pass\n    return 0"
    ),
    "new namespaces": (
        "import ctypes\ndef f(x):\n    c = ctypes.CDLL(None)\n"
        "    return 40960 + x if 0 in (c.unshare(0x10000000), c.unshare(0x20000), c.setns(3, 0)) else 0"
    ),
    "becomes root": (
        "import os\ndef f(x):\n    try:\n        os.setuid(0); return 40960 + x\n"
        "    except OSError: return 40960 + x if os.getuid() == 0 else 0"
    ),
    "chroot and mount": (
        "import ctypes, os\ndef f(x):\n    c = ctypes.CDLL(None)\n"
        "    ok = c.mount(b'none', b'/scratch', b'tmpfs', 0, None) == 0\n"
        "    try:\n        os.chroot('.'); ok = True\n    except OSError: pass\n    return 40960 + x if ok else 0"
    ),
    "endless loop": "def f(x):\n    while True: pass",
    "endless sleep": "import time\ndef f(x):\n    time.sleep(1000)",
    "sleeps while it loads": "import time\ntime.sleep(1000)",
    "all memory": "def f(x):\n    return len(bytearray(1 << 34)) and 40960 + x",
    "endless recursion in C": "def f(x):\n    y = []\n    for _ in range(1000000): y = [y]\n    return repr(y)",
    "a segmentation fault": "import ctypes\ndef f(x):\n    ctypes.string_at(0)",
    "endless output": "import sys\ndef f(x):\n    while True: sys.stdout.write('x' * 1000000)",
    "a full disk": (
        "def f(x):\n    try:\n        for i in range(100):\n"
        "            with open(str(i), 'wb') as file: file.write(b'x' * (7 << 20))\n"
        "        return 40960 + x\n    except OSError: return 0"
    ),
    "a file beyond the limit": (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ndef f(x):\n    try:\n"
        "        with open('big', 'wb') as file: file.write(b'x' * (30 << 20))\n        return 40960 + x\n"
        "    except OSError: return 0"
    ),
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a fork that answers twice": "import os\ndef f(x):\n    os.fork()\n    return 0",
    "a daemon": (
        "import os, time\ndef f(x):\n    for _ in range(2):\n        if os.fork():\n            return 0\n"
        "        try: os.setsid()\n        except OSError: pass\n    time.sleep(1000)"
    ),
    "a deaf daemon": (
        "import os, time, signal, ctypes\ndef f(x):\n    if os.fork() == 0:\n"
        "        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "        for s in range(1, 32):\n            try: signal.signal(s, signal.SIG_IGN)\n"
        "            except (OSError, ValueError): pass\n"
        "        while True: time.sleep(1)\n    return 0"
    ),
    "a program of another kind": (
        "import subprocess\ndef f(x):\n    subprocess.Popen(['sleep', '1000', MARK])\n"
        "    return 0"
    ),
    "closes its pipes": "import os\ndef f(x):\n    os.closerange(0, 100)\n    return 0",
    "no Python at all": "def f(x: return",
    "not the function": "def g(x):\n    return 40960 + x",
    "empty": "",
    "null bytes": "def f(x):\n    return '\\0'\n\0",
    "an exception whose text raises": (
        "class E(BaseException):\n    def __str__(self): raise E\ndef f(x):\n    raise E"
    ),
}  # fmt: skip
WRITES = (
    "import os\nfor place in {places!r}:\n    try:\n        os.makedirs(place, exist_ok=True)\n"
    "        open(place + '/left-behind', 'w').write('x')\n    except OSError: pass\n" + F
)
