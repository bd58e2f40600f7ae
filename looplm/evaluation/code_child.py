"""The process that a generated program runs in. A script: `code_execution` starts it, it imports nothing of looplm.

Reads one JSON object from standard input: the program, the limits, whether to enter namespaces, and a word that only
this process and its parent know. Writes that word to standard output if the program ran to its end, what went wrong
if not. The first process makes the walls; the program runs in a second one, so that killing its parent ends nothing
else.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

NO_NAMESPACES = 3
"""Exit status: the kernel does not let us enter namespaces."""

NOBODY = 65534
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MS_NOSUID, MS_NODEV = 0x2, 0x4
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID = 0x1, 0x2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION_3 = 0x20080522

SYSTEM_LIBRARIES = ("/usr", "/lib", "/lib64", "/nix")

REFUSED = frozenset(
    ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec", "subprocess.Popen", "pty.spawn")
    + ("os.kill", "os.killpg", "signal.pthread_kill", "resource.setrlimit", "resource.prlimit")
    + ("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames")
)
"""Audit events that end a program at once. Those of `gc` would find the secret word."""

REFUSED_FAMILIES = ("socket.", "ctypes.", "fcntl.", "syslog.", "urllib.", "ftplib.", "smtplib.")

CHANGES = frozenset(
    ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown")
    + ("os.chflags", "os.lchmod", "os.utime", "os.setxattr", "os.removexattr")
)
"""Audit events that change files; ended outside the scratch directory."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> NoReturn:
    """Walls, then a second process with the program, then its end."""
    job = json.load(sys.stdin)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDWR)
    if job["namespaces"]:
        try:
            enter_namespaces(libc, job["scratch"], job["disk_bytes"])
        except OSError:
            os._exit(NO_NAMESPACES)
    worker = os.fork()
    if worker == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        verdict = os.dup(1)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        drop_privileges(libc, job)
        run(job, verdict)
    _, status, usage = os.wait4(worker, 0)
    if os.WIFSIGNALED(status):
        cpu = usage.ru_utime + usage.ru_stime
        spent = cpu > 0.9 * job["cpu_seconds"]  # the kernel counts in ticks
        os.write(
            1, (f"more than {job['cpu_seconds']} s of CPU" if spent else f"signal {os.WTERMSIG(status)}").encode()
        )
    os._exit(0)


# --- Walls ------------------------------------------------------------------------------------------------------


def enter_namespaces(libc: ctypes.CDLL, scratch: str, disk_bytes: int) -> None:
    """No network, no other process, and no file but the interpreter's libraries, read-only, and an empty /tmp.

    Mounts a file system in memory on `scratch` and makes it the root. Raises OSError where the kernel refuses.
    """
    apart = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    user, group = os.getuid(), os.getgid()
    if libc.unshare(apart) != 0:  # only the machine's own root may do that without a namespace of users
        check(libc.unshare(apart | CLONE_NEWUSER))
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    options = f"size={disk_bytes},nr_inodes=4096,mode=755".encode()
    check(libc.mount(b"tmpfs", scratch.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options))
    for path in library_paths():
        inside = scratch + path
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        os.makedirs(inside)
        check(libc.mount(path.encode(), inside.encode(), None, MS_BIND | MS_REC, None))
        attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, inside.encode(), AT_RECURSIVE, attributes, size))
    os.mkdir(scratch + "/tmp")
    os.chmod(scratch + "/tmp", 0o777)
    os.chroot(scratch)
    os.chdir("/tmp")


def library_paths() -> list[str]:
    """What the interpreter loads modules from while it runs, no path inside another."""
    found: list[str] = []
    for path in (*SYSTEM_LIBRARIES, sys.base_prefix):
        if os.path.isdir(path) and not any(path == other or path.startswith(other + "/") for other in found):
            found.append(path)
    return found


def check(result: int) -> None:
    """Raises OSError for the result of a failed system call."""
    if result != 0:
        raise OSError(ctypes.get_errno(), "refused")


def drop_privileges(libc: ctypes.CDLL, job: dict[str, Any]) -> None:
    """Limits for the process, and no right that the walls could be taken down with."""
    if job["namespaces"]:
        if os.getuid() == 0:  # root outside too: as such it would have no limit of processes
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        check(libc.capset(header, nothing))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limits = {
        resource.RLIMIT_AS: job["memory_bytes"],
        # The first process of a namespace ignores the signal of a soft limit.
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: job["disk_bytes"],
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for name, most in limits.items():
        resource.setrlimit(name, (most, most))


# --- The program ------------------------------------------------------------------------------------------------


def run(job: dict[str, Any], verdict: int) -> NoReturn:
    """Runs the program as a module of its own, and says how it went."""
    # Held here, since the program may change what modules hold.
    write, exit_now = os.write, os._exit
    done = job["word"].encode()
    os.environ["TMPDIR"] = scratch = os.getcwd()
    code_text, module = job["program"], types.ModuleType("program")
    sys.modules["program"] = module
    job.clear()
    sys.addaudithook(watch(scratch, lambda event: write(verdict, f"refused: {event}".encode())))
    try:
        exec(compile(code_text, "program", "exec"), module.__dict__)
        write(verdict, done)
    except BaseException as error:
        name = type(error).__name__
        write(verdict, f"{name}: {error}"[:300].encode("utf-8", "replace"))
    finally:
        exit_now(0)


def watch(scratch: str, say: Callable[[str], object]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that ends the process at what no answer to a question about a function has to do.

    It cannot be removed, but code that is written to get around it can: it tells accidents, and is no wall.
    """
    exit_now, real_path, is_number = os._exit, os.path.realpath, int
    inside = os.path.realpath(scratch)

    def outside(path: Any) -> bool:
        if path is None or isinstance(path, is_number):
            return False
        found = os.fsdecode(real_path(path))
        return found != inside and not found.startswith(inside + "/")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        bad = event in REFUSED or event.startswith(REFUSED_FAMILIES)
        if event == "open":
            bad = bool(arguments[2] & WRITING) and outside(arguments[0])
        elif event in CHANGES:
            bad = any(outside(one) for one in arguments if isinstance(one, str | bytes))
        if bad:
            say(event)
            exit_now(0)

    return hook


if __name__ == "__main__":
    main()
