"""Classic BPF, as far as a system call filter needs it: the instructions, and an assembler that works from the end.

Jumps only go forward, so what a jump leads to is written first and its distance is known; one that is too far for the
eight bits of a conditional jump goes by way of an unconditional one. Knows no system call.
Sources: linux/bpf_common.h, linux/filter.h, linux/seccomp.h (`struct seccomp_data`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

LD_ABS: Final = 0x20
AND: Final = 0x54
JA: Final = 0x05
JEQ: Final = 0x15
JGT: Final = 0x25
JGE: Final = 0x35
RET: Final = 0x06

NR_OFFSET: Final = 0
ARCH_OFFSET: Final = 4
MAX_INSTRUCTIONS: Final = 4096
_FARTHEST = 255
_INSTRUCTION = struct.Struct("=HBBI")

Label = int
"""An instruction, counted from the end of the program."""


def low_offset(argument: int) -> int:
    """Return where the low half of an argument is; both architectures are little-endian."""
    return 16 + 8 * argument


@dataclass(frozen=True, slots=True)
class Instruction:
    """`struct sock_filter`."""

    code: int
    jt: int
    jf: int
    k: int


class Assembler:
    """A program from its last instruction to its first."""

    def __init__(self) -> None:
        self._reversed: list[Instruction] = []
        self._returns: dict[int, Label] = {}

    def ret(self, value: int) -> Label:
        """End with `value`; one that is near enough is used again."""
        label = self._returns.get(value)
        if label is None or self._distance(label) > _FARTHEST // 2:
            label = self._returns[value] = self._add(Instruction(RET, 0, 0, value))
        return label

    def jump(self, code: int, k: int, yes: Label, no: Label) -> Label:
        """Compare the accumulator with `k`."""
        yes, no = self._near(yes), self._near(no)
        yes = self._near(yes)  # making the other near may have taken this one away
        return self._add(Instruction(code, self._distance(yes), self._distance(no), k))

    def load(self, offset: int, then: Label) -> Label:
        """Load a word of `struct seccomp_data` and go on at `then`."""
        return self._before(Instruction(LD_ABS, 0, 0, offset), then)

    def mask(self, k: int, then: Label) -> Label:
        """Keep the bits of `k` in the accumulator and go on at `then`."""
        return self._before(Instruction(AND, 0, 0, k), then)

    def finish(self, first: Label) -> tuple[Instruction, ...]:
        """Return the program that begins at `first`."""
        if self._distance(first):
            self._add(Instruction(JA, 0, 0, self._distance(first)))
        if len(self._reversed) > MAX_INSTRUCTIONS:
            raise ValueError(f"{len(self._reversed)} instructions; the kernel takes {MAX_INSTRUCTIONS}")
        return tuple(reversed(self._reversed))

    def _before(self, instruction: Instruction, then: Label) -> Label:
        if self._distance(then):
            self._add(Instruction(JA, 0, 0, self._distance(then)))
        return self._add(instruction)

    def _near(self, label: Label) -> Label:
        """Return an instruction that leads to `label`, with room for one more in between."""
        if self._distance(label) < _FARTHEST:
            return label
        return self._add(Instruction(JA, 0, 0, self._distance(label)))

    def _distance(self, label: Label) -> int:
        """Return how many instructions the next one would skip to get to `label`."""
        return len(self._reversed) - label - 1

    def _add(self, instruction: Instruction) -> Label:
        self._reversed.append(instruction)
        return len(self._reversed) - 1


def encode(program: tuple[Instruction, ...]) -> bytes:
    """Return the array of `struct sock_filter`."""
    return b"".join(_INSTRUCTION.pack(each.code, each.jt, each.jf, each.k) for each in program)
