"""Programs that misbehave, in both grades of isolation: each ends, has not passed, and leaves nothing behind."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from looplm.errors import UserError
from looplm.evaluation import code_child, code_execution
from looplm.evaluation.code_execution import Limits, Outcome, find_isolation, run_program, run_programs

LIMITS = Limits(cpu_seconds=1, wall_seconds=20, memory_mb=256, disk_mb=1)
SHORT = replace(LIMITS, wall_seconds=0.8)

WITHOUT_HOOK = "import __main__ as m; m.REFUSED = m.CHANGES = (); m.REFUSED_FAMILIES = ('none.',); m.WRITING = 0\n"
"""Gets around the audit hook, so that what is left is the kernel's wall."""

ENDS = {
    "a wrong answer": ("assert 1 == 2, 'so'", "AssertionError: so"),
    "no Python": ("def f(:", "SyntaxError"),
    "a null byte": ("a\0b", "SyntaxError"),
    "100 GB": ("bytearray(100 << 30)", "MemoryError"),
    "recursion": ("def f(): return f()\nf()", "RecursionError"),
    "sys.exit": ("import sys\nsys.exit(0)", "SystemExit"),
    "os._exit": ("import os\nos._exit(0)", "ended before its tests were done"),
    "an exception that cannot be shown": (
        "class E(Exception):\n def __str__(self): raise E\nraise E",
        "ended before its tests were done",
    ),
    "a fork": ("import os\nwhile True: os.fork()", "refused: os.fork"),
    "a fork that catches everything": (
        "import os\ntry:\n os.fork()\nexcept BaseException: pass",
        "refused: os.fork",
    ),
    "a shell": ("import os\nos.system('true')", "refused: os.system"),
    "a subprocess": ("import subprocess\nsubprocess.run(['true'])", "refused: subprocess.Popen"),
    "its parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "refused: os.kill"),
    "a socket": ("import socket\nsocket.socket()", "refused: socket.__new__"),
    "a name to look up": ("import socket\nsocket.getaddrinfo('localhost', 80)", "refused: socket.getaddrinfo"),
    "the C library": ("import ctypes\nctypes.CDLL(None)", "refused: ctypes.dlopen"),
    "a file in the root": ("open('/planted', 'w')", "refused: open"),
    "a file, caught": ("try:\n open('/planted', 'w')\nexcept BaseException: pass", "refused: open"),
    "a file by way of a link": (
        "import os\nos.symlink('/', 'away')\nopen('away/planted', 'w')",
        "refused: os.symlink",
    ),
    "a neighbour": ("import os\nopen(os.getcwd() + '-planted', 'w')", "refused: open"),
    "a removal": ("import os\nos.remove('/usr')", "refused: os.remove"),
    "higher limits": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "refused: resource"),
    "a large file": ("f = open('a', 'wb')\nwhile True: f.write(b'x' * 100000)", "OSError"),
    "input": ("input()", "EOFError"),
}


@pytest.fixture(scope="module", params=["namespaces", "process"])
def isolation(request):
    if request.param == "namespaces" and find_isolation() != "namespaces":
        pytest.skip("the kernel refuses namespaces")
    return request.param


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_program(name, isolation):
    program, reason = ENDS[name]
    outcome = run_program(program, LIMITS, isolation)
    assert not outcome.passed
    assert outcome.reason.startswith(reason), outcome


@pytest.mark.parametrize("program", ["while True: pass", "while True: print('x' * 100000)"])
def test_what_computes_for_ever_is_ended(program, isolation):
    assert run_program(program, LIMITS, isolation) == Outcome(False, "more than 1 s of CPU")


FLOOD = "import os\nwhile True:\n for i in range(64):\n  try: os.write(i, b'x' * 999)\n  except OSError: pass"


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(1000)", FLOOD])
def test_what_waits_for_ever_is_ended(program, isolation):
    begun = time.monotonic()
    assert run_program(program, SHORT, isolation) == Outcome(False, "more than 0.8 s")
    assert time.monotonic() - begun < 5


def test_programs_that_pass(isolation):
    good = [
        "assert sum([1, 2]) == 3",
        "open('a.txt', 'w').write('x')\nassert open('a.txt').read() == 'x'",
        "import os\nos.mkdir('a')\nos.rename('a', 'b')\nos.rmdir('b')",
        "from typing import List\nimport math, re, collections, itertools, functools, heapq, random, datetime",
        "import tempfile\nwith tempfile.NamedTemporaryFile() as f: f.write(b'x')",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n a: 'int' = 1\nassert A().a == 1",
        "import sys, os\nassert not os.environ.keys() - {'LC_CTYPE', 'TMPDIR'}\nassert not sys.flags.optimize",
        "if __name__ == '__main__': raise SystemExit",
        "print('\\N{SNOWMAN}')",
    ]
    for program, outcome in zip(good, run_programs(good, LIMITS, isolation, num_processes=2), strict=True):
        assert outcome == Outcome(True, "passed"), (program, outcome)


def test_each_program_has_an_empty_directory_which_is_wiped(isolation, tmp_path, monkeypatch):
    monkeypatch.setattr(code_execution, "TemporaryDirectory", lambda **k: _Directory(dir=tmp_path, **k))
    look = "import os\nassert not os.listdir('.')\nopen('kept', 'w')\nos.mkdir('d')\nopen('d/e', 'w')"
    for _ in range(2):
        assert run_program(look, LIMITS, isolation).passed
    assert run_program(look + "\nwhile True: pass", SHORT, isolation).passed is False
    assert not list(tmp_path.iterdir())


def test_a_word_that_was_not_given_is_none(isolation):
    """Whoever writes to the pipe has not passed by it."""
    flood = "import os\nfor i in range(3, 9):\n try: os.write(i, b'passed')\n except OSError: pass\nos._exit(0)"
    assert not run_program(flood, LIMITS, isolation).passed


def test_walls_stand_without_the_hook():
    if find_isolation() != "namespaces":
        pytest.skip("the kernel refuses namespaces")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    tried = {
        f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)": "OSError: [Errno 101]",
        "import socket\nsocket.socket(socket.AF_UNIX).connect('/run/docker.sock')": "FileNotFoundError",
        "open('/usr/planted', 'w')": "OSError: [Errno 30]",
        f"open({str(Path(__file__))!r})": "FileNotFoundError",
        "open('/etc/passwd')": "FileNotFoundError",
        "open('/proc/self/mem')": "FileNotFoundError",
        "import os\nos.kill(-1, 9)": "ProcessLookupError",
        "import os\nassert os.getpid() == 1 and os.getppid() == 0 and os.getuid() != 0\nraise KeyError": "KeyError",
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\n"
        "assert l.unshare(0x20000) == 0, ctypes.get_errno()": "AssertionError: 1",
        "import os\nos.chroot('..')": "PermissionError",
        "for i in range(4):\n with open(str(i), 'wb') as f: f.write(b'x' * 500000)": "OSError: [Errno 28]",
    }
    with listener:
        outcomes = run_programs([WITHOUT_HOOK + program for program in tried], LIMITS, "namespaces")
        for (program, reason), outcome in zip(tried.items(), outcomes, strict=True):
            assert outcome.reason.startswith(reason), (program, outcome)
    assert not Path("/usr/planted").exists()


def test_no_descendant_outlives_a_program(tmp_path, monkeypatch):
    """In a namespace, where even a process in a session of its own goes with the first; here, without the limit that
    lets none begin."""
    if find_isolation() != "namespaces":
        pytest.skip("the kernel refuses namespaces")
    unlimited = tmp_path / "code_child_unlimited.py"
    child = Path(code_child.__file__).read_text(encoding="utf-8")
    unlimited.write_text(child.replace("resource.RLIMIT_NPROC: 0,", ""), encoding="utf-8")
    monkeypatch.setattr(code_child, "__file__", str(unlimited))
    begin = "import os, time\nif not os.fork():\n os.setsid()\n time.sleep(60)\nwhile True: time.sleep(1)"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_program, WITHOUT_HOOK + begin, SHORT, "namespaces")
        most = 0
        while not running.done():
            most = max(most, number_of_processes(unlimited.name))
            time.sleep(0.05)
    assert running.result() == Outcome(False, "more than 0.8 s")
    assert most == 3
    deadline = time.monotonic() + 5
    while number_of_processes(unlimited.name):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stopped_caller_leaves_no_program(monkeypatch):
    pids = []

    def interrupted(pid: int, seconds: float) -> bool:
        pids.append(pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(code_execution, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_program("while True: pass", LIMITS, "process")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], signal.SIG_DFL)


def test_isolation_is_found_by_trying(monkeypatch):
    answers = {"namespaces": Outcome(False, "the kernel refuses namespaces"), "process": Outcome(True, "passed")}
    monkeypatch.setattr(code_execution, "run_program", lambda program, limits, name: answers[name])
    assert find_isolation() == "process"
    answers["process"] = Outcome(False, "no process")
    with pytest.raises(UserError, match="no process"):
        find_isolation()
    monkeypatch.setattr(code_execution.sys, "platform", "darwin")
    with pytest.raises(UserError, match="Linux only"):
        find_isolation()


@pytest.mark.parametrize("wrong", [{"cpu_seconds": 0}, {"memory_mb": 1}, {"disk_mb": 0}, {"cpu_seconds": 0.5}])
def test_impossible_limits(wrong):
    with pytest.raises(UserError):
        replace(LIMITS, **wrong)


class _Directory(code_execution.TemporaryDirectory):
    """The original, whatever the module calls so now."""


def number_of_processes(name: str) -> int:
    """How many run a script of that name."""
    found = 0
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += name.encode() in command.read_bytes()
    return found
