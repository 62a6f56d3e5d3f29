"""The program that locks itself in and then runs untrusted code: `python -I -S sandbox_init.py SETTINGS STATUS`.

`SETTINGS` is the length of a JSON text at the beginning of the standard input; what follows is the code's own input.
It makes namespaces of its own for users, mounts, processes, network and IPC, needs no privilege for that on most Linux
systems, and never runs anything unlocked: a step that fails ends it, with the reason written to the descriptor
`STATUS`, which the code does not have. What the code gets to see is a root folder with the system's programs and
libraries, the Python installation and whatever else is named, all read-only; an empty folder in memory as home;
`/dev/null`, `zero` and `urandom`; no `/proc`, no `/sys`, and no network unless the settings say so. It has no
capabilities and cannot get any.

It uses nothing but the standard library, and ctypes for the calls that Python has no function for.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID."""
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22
NOBODY = 65534
DEFAULTS = {"root": "/tmp", "folder": "/sandbox", "network": False, "user": NOBODY, "descriptors": []}
"""The new root folder is put together at `root`; `folder` is the code's working folder in it, `user` its user where
root starts it, `descriptors` what it gets besides the standard ones."""
DEVICES = ("null", "zero", "urandom")
SYSTEM_CALLS = {
    # machine: (audit architecture, pivot_root, calls that are refused): memory that no limit counts (memfd_create,
    # shmget, msgget, io_uring_setup), and what reaches out of a process or into the kernel (ptrace, process_vm_readv,
    # process_vm_writev, keyctl, add_key, request_key, bpf, perf_event_open, userfaultfd, mount, unshare, setns, and
    # last, where there is to be no network, socket: sockets to a virtual machine's host know no namespaces)
    "x86_64": (0xC000003E, 155, (319, 29, 68, 425, 101, 310, 311, 250, 248, 249, 321, 298, 323, 165, 272, 308, 41)),
    "aarch64": (0xC00000B7, 41, (279, 194, 186, 425, 117, 270, 271, 219, 217, 218, 280, 241, 282, 40, 97, 268, 198)),
}
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    settings = {**DEFAULTS, **json.loads(read_exactly(int(sys.argv[1])))}
    is_root = os.getuid() == 0
    try:
        if os.uname().machine not in SYSTEM_CALLS:
            raise OSError(f"no list of system calls for {os.uname().machine}")
        network = 0 if settings["network"] else NEW_NETWORK
        check(libc.unshare(NEW_NAMESPACES | network | (0 if is_root else NEW_USER)), "unshare")
        if not is_root:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # which the kernel forgets with a new user namespace
            map_user(os.open("/proc", os.O_PATH), os.getuid(), os.getgid())
        if (init := os.fork()) == 0:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            run_as_init(settings, is_root)
    except BaseException as error:
        not_contained(error)
    _, status = os.waitpid(init, 0)
    os._exit(exit_code(status))


def run_as_init(settings: Any, is_root: bool) -> None:
    """The first process of the namespace: with its end the kernel kills all others."""
    try:
        proc = os.open("/proc", os.O_PATH)
        build_root(settings)
        if (program := os.fork()) == 0:
            os.setsid()
            if is_root:
                give_up_root(proc, settings["user"])
            restrict(settings)
            os.execve(settings["command"][0], settings["command"], settings["environment"])
    except BaseException as error:
        not_contained(error)
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(-1, signal.SIGCONT)  # with it others may have been stopped, for whom somebody waits
        elif pid == program:
            os._exit(exit_code(status))


def give_up_root(proc: int, user: int) -> None:
    """Root has mounted what is there; the code has another user, in a namespace where its processes are counted. User 0
    can read what root owns, and has no other privilege of root's."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # else its files in /proc belong to root
    check(libc.unshare(NEW_USER), "unshare")
    map_user(proc, user, user)


def map_user(proc: int, uid: int, gid: int) -> None:
    """Not to root: so the next exec leaves no capability, not even within the namespace."""
    for path, text in {
        "self/setgroups": "deny",
        "self/uid_map": f"{NOBODY} {uid} 1",
        "self/gid_map": f"{NOBODY} {gid} 1",
        "sys/user/max_user_namespaces": "0",  # no namespaces within, whose mounts no limit counts
    }.items():
        with open(os.open(path, os.O_WRONLY, dir_fd=proc), "w") as file:
            file.write(text)


def build_root(settings: Any) -> None:
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = settings["root"]
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in filter(os.path.isdir, settings["readable"]):
        if os.path.exists(root + path):
            continue  # with a folder above it
        if os.path.islink(path):
            os.makedirs(root + os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
        else:
            bind(path, root + path)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for device in DEVICES:
        open(f"{root}/dev/{device}", "x").close()
        mount(f"/dev/{device}", f"{root}/dev/{device}", None, MS_BIND)
    home = f"{root}/sandbox"  # not /home, below which the Python installation may be
    os.mkdir(home)
    mount("tmpfs", home, "tmpfs", MS_NOSUID | MS_NODEV, f"size={settings['disk_bytes']},mode=777,nr_inodes=4096")
    for name, text in settings["files"].items():
        with open(f"{home}/{name}", "x") as file:
            file.write(text)
    os.chdir(root)
    check(libc.syscall(SYSTEM_CALLS[os.uname().machine][1], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(settings["folder"])


def bind(path: str, target: str) -> None:
    """Makes a folder visible, read-only with all that is mounted below it."""
    os.makedirs(target, exist_ok=True)
    mount(path, target, None, MS_BIND | MS_REC)
    flags = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048)  # those that are locked must stay
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags)


def restrict(settings: Any) -> None:
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    kept = sorted(settings["descriptors"])
    for after, before in zip([2, *kept], [*kept, 4096], strict=True):
        os.closerange(after + 1, before)
    refuse_system_calls(settings["network"])


def refuse_system_calls(has_network: bool) -> None:
    """A seccomp filter: EPERM for the calls of the table and for the whole of another architecture's."""
    architecture, _, calls = SYSTEM_CALLS[os.uname().machine]
    refused = list(calls[:-1] if has_network else calls)
    load, equal, give = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    program += [(equal, len(refused) - place, 0, number) for place, number in enumerate(refused)]
    if os.uname().machine == "x86_64":  # x32 calls have the same architecture and other numbers
        program.insert(4, (0x35, len(refused) + 1, 0, 0x40000000))
    program += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050001)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    filter_program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(filter_program), 0, 0), "seccomp")


def read_exactly(size: int) -> bytes:
    """The first bytes of the standard input; the rest is for the code."""
    found = b""
    while len(found) < size:
        chunk = os.read(0, size - len(found))
        if not chunk:
            raise EOFError
        found += chunk
    return found


def mount(source: str, target: str, kind: "str | None", flags: int, options: str = "") -> None:
    done = libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(done, f"mount {target}")


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def not_contained(error: BaseException) -> None:
    os.write(int(sys.argv[2]), str(error).encode())
    os._exit(1)


if __name__ == "__main__":
    main()
