"""Read off what the compiler has made of a kernel: which units it uses, what it keeps, and what it waits for."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton


def units_of(ptx: str) -> str:
    """The matrix units that a kernel uses."""
    return next((name for name in ("tcgen05", "wgmma", "mma.sync") if name in ptx), "-")


def layout_of(ttgir: str) -> str:
    """Return the use of matrix units: warps along rows x columns of a tile, and the shapes of the instructions."""
    found = re.findall(r"nvidia_mma<{.*?warpsPerCTA = \[(.*?)\], instrShape = \[(.*?)\]", ttgir)
    warps, shapes = (sorted({match[part].replace(", ", "x") for match in found}) for part in (0, 1))
    return "+".join(warps) + ":" + "+".join(shapes)


def open_copies(ptx: str) -> int:
    """Count the groups of copies to shared memory still on their way when a loop goes on."""
    return max((int(count) for count in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0)


def loads_ahead(ptx: str) -> str:
    """Count the loads before a kernel's wait for those in front of it; `-` if it does not wait."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    assert not wait or "st.global" not in before, "what others may still read is not written"
    return str(before.count("ld.global")) if wait else "-"


def hidden_exponentials(compiled: Any) -> str:
    """Count what is weighed while a product goes on: ptxas may put its wait in front of the weights."""
    if "wgmma.wait_group.sync.aligned 1" not in compiled.asm["ptx"] or "ex2" not in compiled.asm["ptx"]:
        return "-"
    between = re.findall(r"DEPBAR\.LE gsb0, 0x1\b(.*?)DEPBAR\.LE gsb0, 0x0\b", compiled.asm["sass"], re.DOTALL)
    return str(min(part.count("MUFU.EX2") for part in between))


def registers_of(compiled: Any) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of its stack and local memory, as the machine code needs them."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


# Of an instruction: barriers that it waits for, the one that its result sets, itself.
_INSTRUCTION = re.compile(r"(\S\S):\S:(\S):\S:\S+\s+(.*)")


def waits_for_loads(compiled: Any) -> tuple[str, str]:
    """Count the loads that the program waits for one after the other, in machine code for capability 9.0.

    Returns:
        before the first copy to shared memory in a turn of the loop around it, and in a turn of the first loop behind
        that copy, which copies while it computes; `-` each: it has no copies in loops.
    """
    lines = [line.strip() for line in compiled.asm["sass"].splitlines() if line.strip()]
    labels = {line.rstrip(":"): place for place, line in enumerate(lines) if re.fullmatch(r"LBB\d+:", line)}
    copy = next((place for place, line in enumerate(lines) if "LDGSTS" in line), None)
    jumps = ((place, re.search(r"BRA (LBB\d+)", line)) for place, line in enumerate(lines))
    loops = [(labels.get(jump[1], place), place) for place, jump in jumps if jump is not None]
    loops = [(begin, end) for begin, end in loops if begin < end]
    if copy is None or not (around := [begin for begin, end in loops if begin < copy < end]):
        return "-", "-"
    behind = min(((begin, end) for begin, end in loops if begin > copy), default=None)
    inside = "-" if behind is None else str(_waits(lines[behind[0] : behind[1]]))
    return str(_waits(lines[max(around) : copy + 1])), inside


def _waits(lines: list[str]) -> int:
    """Return the length of the longest chain of loads each of which is issued when the one before has come."""
    pending: dict[int, int] = {}  # barrier -> waits before the load that sets it
    waits = 0
    for line in lines:
        if (found := _INSTRUCTION.match(line)) is None:
            continue
        waited, sets, instruction = found.groups()
        mask = 0 if waited == "--" else int(waited, 16)
        for barrier in [one for one in pending if mask >> one & 1]:
            waits = max(waits, pending.pop(barrier) + 1)
        if "LDG." in instruction and sets != "-":
            pending[int(sets)] = max(pending.get(int(sets), 0), waits)
    return waits
