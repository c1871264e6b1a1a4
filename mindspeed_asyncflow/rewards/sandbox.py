"""Runs one Python program that nobody trusts, in a process of its own with hard limits. Linux on x86_64 and aarch64.

The parent starts this file as a script. It takes its limits, then asks the kernel (seccomp, which needs no privilege)
to refuse from now on: network sockets, new processes and programs, opening or changing files, signals to others. Of the
privileges of a superuser only reading stays. Then it runs the program. What the limits do not cover: the program can
read what the user can read, and use one core for `cpu_s` seconds. It is no protection against a hole in the kernel.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _EACCES, _ENOSYS = 1, 13, 38
_WRITING = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_CLONE_THREAD = 0x10000
_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_ABOVE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # BPF instructions
_CAPABILITIES_VERSION, _READ_ANYTHING = 0x20080522, 1 << 2  # CAP_DAC_READ_SEARCH
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38

# fmt: off
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "x86_64": {
        "audit": 0xC000003E, "clone": 56, "clone3": 435, "open_flags": {2: 1, 257: 2}, "openat2": 437,
        "refused": [  # prctl fork vfork execve execveat socket connect io_uring_setup kill tkill ptrace and so on
            157, 57, 58, 59, 322, 41, 42, 425, 62, 129, 200, 234, 297, 424, 434, 101, 310, 311,
            76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133, 235, 258, 259, 260, 261, 263, 264, 265,
            266, 268, 280, 316, 188, 189, 190, 160, 302, 165, 166, 155, 161, 272, 308, 317, 321, 319, 323, 298, 248,
            249, 250, 109, 112, 29, 30, 64, 68, 240, 197, 198, 199, 304, 452, 463, 466,
        ],
    },
    "aarch64": {
        "audit": 0xC00000B7, "clone": 220, "clone3": 435, "open_flags": {56: 2}, "openat2": 437,
        "refused": [
            167, 221, 281, 198, 203, 425, 129, 130, 131, 138, 240, 424, 434, 117, 270, 271,
            45, 46, 34, 35, 36, 37, 38, 276, 33, 52, 53, 54, 55, 88, 5, 6, 7, 164, 261, 40, 39, 41, 51, 97, 268, 277,
            280, 279, 282, 241, 217, 218, 219, 154, 157, 194, 196, 190, 186, 180, 14, 15, 16,
            265, 452, 463, 466,
        ],
    },
}
# fmt: on


def _filter(machine: str) -> bytes:
    """A BPF program: which system calls end with an error. Input: number at 0, architecture at 4, arguments at 16."""
    known = _ARCHITECTURES[machine]
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, known["audit"]),
        (_RETURN, 0, 0, _KILL),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, 0),
        (_JUMP_ABOVE, 0, 1, 0x40000000),  # x32 calls too
        (_RETURN, 0, 0, _KILL),
    ]
    for number in known["refused"]:
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    for number in (known["clone3"], known["openat2"]):  # their arguments cannot be looked at; libraries fall back
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    code += [  # threads are allowed, processes are not
        (_JUMP_EQUAL, 0, 4, known["clone"]),
        (_LOAD, 0, 0, 16),
        (_JUMP_SET, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number, argument in known["open_flags"].items():
        code += [
            (_JUMP_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, 16 + 8 * argument),
            (_JUMP_SET, 0, 1, _WRITING),
            (_RETURN, 0, 0, _ERRNO | _EACCES),
            (_RETURN, 0, 0, _ALLOW),
        ]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def confine(cpu_s: int, memory_mb: int, output_bytes: int) -> None:
    """From here on this process is inside the limits. Raises OSError where the kernel refuses."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    if library.capget(header, sets):
        raise OSError(ctypes.get_errno(), "the kernel does not tell the privileges of this process")
    sets[:] = [sets[0] & _READ_ANYTHING, sets[1] & _READ_ANYTHING, 0, 0, 0, 0]
    if library.capset(header, sets):
        raise OSError(ctypes.get_errno(), "the kernel does not let this process give up its privileges")
    code = _filter(platform.machine())
    buffer = ctypes.create_string_buffer(code)
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p).value)
    for call in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)):
        if library.prctl(*call):
            raise OSError(ctypes.get_errno(), "the kernel refuses to confine this process (seccomp)")


def _main() -> None:
    """Last argument: JSON of limits, parent and a descriptor. Standard input: length of the program in bytes as a line,
    the program, a word as a line, and what the program reads.

    The word goes to the descriptor when the program has run to its end; one that leaves early does not say it.
    """
    limits, parent, said = json.loads(sys.argv[-1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    size = int(sys.stdin.buffer.readline())
    program = sys.stdin.buffer.read(size).decode("utf-8")
    word = sys.stdin.buffer.readline()
    code = compile(program, "<answer>", "exec")
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.argv[:] = [""]
    confine(**limits)
    try:
        exec(code, names)
    except SystemExit as error:
        if error.code not in (None, 0) or not word.startswith(b"exits:"):
            raise
    sys.stdout.flush()
    os.write(said, word)


if __name__ == "__main__":
    _main()
