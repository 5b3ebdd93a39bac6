"""A small interpreter of classic BPF as seccomp(2) uses it: what a program says to a call, on any architecture.

It reads the encoded bytes, checks them the way the kernel does before it takes a program, and knows nothing of how they
were made. Sources: Documentation/networking/filter.rst; kernel/seccomp.c `seccomp_check_filter`.
"""

from __future__ import annotations

import struct

_DATA = struct.Struct("<iIQ6Q")
_INSTRUCTION = struct.Struct("<HBBI")
_LD_ABS, _AND, _JA, _RET = 0x20, 0x54, 0x05, 0x06
_TESTS = {0x15: int.__eq__, 0x25: int.__gt__, 0x35: int.__ge__, 0x45: int.__and__}

Program = list[tuple[int, int, int, int]]


def load(code: bytes) -> Program:
    """Return the program in `code`, which must be one that the kernel would take."""
    program = list(_INSTRUCTION.iter_unpack(code))
    assert 0 < len(program) <= 4096
    for at, (op, jt, jf, k) in enumerate(program):
        room = len(program) - at - 1
        assert op in (_LD_ABS, _AND, _JA, _RET, *_TESTS), hex(op)
        assert op != _LD_ABS or (k % 4 == 0 and k < _DATA.size)
        assert op != _JA or k < room
        assert op not in _TESTS or max(jt, jf) < room
    assert program[-1][0] == _RET
    return program


def run(program: Program, arch: int, number: int, *args: int) -> int:
    """Return the program's answer to a call; what a register can't hold is cut off."""
    registers = [arg % 2**64 for arg in (*args, *[0] * 6)[:6]]
    number = number % 2**32
    data = _DATA.pack(number - 2**32 if number >= 2**31 else number, arch, 0, *registers)
    accumulator, at = 0, 0
    while True:
        op, jt, jf, k = program[at]
        at += 1
        if op == _RET:
            return k
        if op == _LD_ABS:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == _AND:
            accumulator &= k
        elif op == _JA:
            at += k
        else:
            at += jt if _TESTS[op](accumulator, k) else jf
