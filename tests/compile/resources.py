"""What a kernel's machine code takes, and the gate that holds it to resources.json. `scripts/resources` rewrites that file.

Cubins are read with NVIDIA's cuobjdump and nvdisasm, which Triton's package brings. Figures: threads of a thread block,
registers a thread, bytes of stack, bytes of shared memory, bytes of local memory stored and loaded (spills; as ptxas reports
them: each instruction once), bytes of the widest load and store of global memory, how many of either, instructions (without
padding), casts to e4m3 whose other half is undefined and yet used.

The last is wrong code: ptxas 12.8 makes it where both halves of a word are the same codes (wrong bytes on an H200).
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

BASELINE = Path(__file__).with_name("resources.json")
UPDATE = "scripts/resources --update"
SLACK = 8  #: registers a thread that a kernel may take more
MORE_ACCESSES = 1.25  #: times as many accesses to global memory: some became narrower, though not the widest
REMARKABLE = 0.1  #: instructions are no reason to fail; a change by this share is said
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}  #: part of an opcode -> bytes; none of them: 4
INSTRUCTION_BYTES = 16
#: an instruction, behind its address and predicate: opcode, modifiers
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)([.\w]*)", re.MULTILINE)
#: the registers that an instruction writes begin at the first one behind its opcode (a shuffle's behind its predicate)
WRITTEN = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*) +(?:P\w+, )?R(\d+)\b")
MERGED = re.compile(r"F2FP\.[\w.]*MERGE_C R\d+, [^,]+, [^,]+, R(\d+)\b")
STORED = re.compile(r"\b(ST[GSL]?\b[\w.]*) [^,]*, R(\d+)\b")
STACK_POINTER = 1  #: stands for "any register" where the upper half of the result does not matter
#: sm_90, a multiprocessor: warps, thread blocks, registers, bytes of shared memory; a warp's registers come in lots of 256
WARPS, BLOCKS, REGISTERS, LOT, SHARED, SHARED_RESERVED = 64, 32, 65_536, 256, 233_472, 1_024


@dataclass(frozen=True)
class Resources:
    """One kernel's figures; see the module."""

    threads: int
    registers: int
    stack: int
    shared: int
    spill_stores: int
    spill_loads: int
    load: int
    store: int
    loads: int
    stores: int
    instructions: int
    stray_merges: int

    @property
    def resident_warps(self) -> int:
        """Warps that a multiprocessor of sm_90 holds at a time."""
        warps = -(-self.threads // 32)
        lot = -(-self.registers * 32 // LOT) * LOT * warps
        return warps * min(BLOCKS, WARPS // warps, REGISTERS // lot, SHARED // (self.shared + SHARED_RESERVED))


@dataclass(frozen=True)
class Change:
    """A figure that is not the baseline's; verdict "worse" fails, "better" asks for an update, "note" is only said."""

    kernel: str
    what: str
    was: int
    now: int
    verdict: str


@dataclass(frozen=True)
class Code:
    """A kernel in a cubin: the figures that the file states, and the instructions."""

    threads: int
    registers: int
    stack: int
    shared: int
    text: bytes


def tool(name: str) -> str:
    """Path of one of NVIDIA's binary utilities.

    Raises:
        FileNotFoundError: neither Triton's package nor PATH has it.
    """
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        found = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name
        if found.is_file():
            return str(found)
    on_path = shutil.which(name)
    if on_path is None:
        raise FileNotFoundError(f"{name}: neither in triton's package nor on PATH; pip install triton, or the CUDA toolkit")
    return on_path


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_cubin(cubin: bytes, threads: Mapping[str, int] | int, shared: int = 0) -> dict[str, Code]:
    """Every kernel of a cubin, by the function's name.

    Args:
        cubin: an ELF file.
        threads: of a thread block, by the function's name, or of the only one.
        shared: bytes of shared memory that the launch adds.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        usage = _output(tool("cuobjdump"), "-res-usage", str(path))
    text = text_sections(cubin)
    found = {}
    for name, registers, stack, static in re.findall(r"Function (\S+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage):
        count = threads if isinstance(threads, int) else threads[name]
        found[name] = Code(count, int(registers), int(stack), int(static) + shared, text[name])
    return found


def text_sections(elf: bytes) -> dict[str, bytes]:
    """The contents of an ELF file's sections ".text.NAME", by NAME."""
    (headers,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", elf, headers + i * size) for i in range(count)]
    found = {}
    for name_at, _, _, _, begin, length in rows:
        first = rows[names][4] + name_at
        name = elf[first : elf.index(b"\0", first)].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = elf[begin : begin + length]
    return found


def measure(codes: Mapping[str, Code]) -> dict[str, Resources]:
    """The figures of kernels for sm_90, all disassembled at once: starting nvdisasm takes far longer than its work.

    Raises:
        ValueError: the disassembly does not have as many instructions as the code.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "code.bin"
        path.write_bytes(b"".join(code.text for code in codes.values()))
        text = _output(tool("nvdisasm"), "--binary", "SM90a", "--no-vliw", "--no-dataflow", str(path))
    lines = [line for line in text.splitlines() if INSTRUCTION.match(line)]
    result, begin = {}, 0
    for name, code in codes.items():
        end = begin + len(code.text) // INSTRUCTION_BYTES
        counts = count_accesses(INSTRUCTION.findall("\n".join(lines[begin:end])))
        stray = len(stray_merges(lines[begin:end]))
        result[name] = Resources(code.threads, code.registers, code.stack, code.shared, **counts, stray_merges=stray)
        begin = end
    if begin != len(lines):
        raise ValueError(f"nvdisasm: has {len(lines)} instructions, needs {begin} as the code; is it another instruction set?")
    return result


def stray_merges(lines: Iterable[str]) -> list[str]:
    """Of one kernel's disassembly, casts that merge what no instruction before wrote, and words written with such a half."""
    written, halves, found = {STACK_POINTER}, set(), []
    for line in lines:
        merged, stored, writes = MERGED.search(line), STORED.search(line), WRITTEN.match(line)
        if merged and int(merged[1]) not in written:
            found.append(line.strip())
        if stored and not {"U8", "U16"} & set(stored[1].split(".")) and halves & set(_registers(stored[1], stored[2])):
            found.append(line.strip())
        if writes:
            target = set(_registers(writes[1], writes[2]))
            written |= target
            halves = halves | target if merged and int(merged[1]) == STACK_POINTER else halves - target
    return found


def _registers(opcode: str, first: str) -> range:
    """The registers of an operand of an instruction, `first` among them."""
    parts = opcode.split(".")
    count = 4 if "128" in parts else 2 if {"64", "WIDE"} & set(parts) or parts[0] == "CS2R" else 1
    return range(int(first), int(first) + count)


def count_accesses(instructions: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Spills, accesses to global memory and instructions of one kernel; an instruction is (opcode, modifiers)."""
    found = dict.fromkeys(("spill_stores", "spill_loads", "load", "store", "loads", "stores", "instructions"), 0)
    for opcode, modifiers in instructions:
        found["instructions"] += opcode != "NOP"
        size = next((WIDTHS[part] for part in modifiers.split(".") if part in WIDTHS), 4)
        if opcode in ("STL", "LDL"):
            found["spill_stores" if opcode == "STL" else "spill_loads"] += size
        elif opcode in ("LDG", "LD", "LDGSTS"):
            found["load"], found["loads"] = max(found["load"], size), found["loads"] + 1
        elif opcode in ("STG", "ST"):
            found["store"], found["stores"] = max(found["store"], size), found["stores"] + 1
    return found


def changes_of(kernel: str, was: Resources, now: Resources, same_compilers: bool = True) -> list[Change]:
    """What became of one kernel; other compilers take other registers, so then only widths and spills are compared."""
    found = []
    for what in ("stack", "spill_stores", "spill_loads", "stray_merges"):
        found += _change(kernel, was, now, what, more_is="worse", less_is="better")
    for what in ("load", "store"):
        found += _change(kernel, was, now, what, more_is="better", less_is="worse")
    if not same_compilers:
        return found
    if now.registers > was.registers + SLACK or now.resident_warps < was.resident_warps:
        found += _change(kernel, was, now, "registers", more_is="worse", less_is="better")
        found += _change(kernel, was, now, "resident_warps", more_is="better", less_is="worse")
    else:
        found += _change(kernel, was, now, "registers", more_is="note", less_is="better")
    for what in ("loads", "stores"):
        if getattr(now, what) > MORE_ACCESSES * getattr(was, what):
            found += _change(kernel, was, now, what, more_is="worse", less_is="better")
    found += _change(kernel, was, now, "threads", more_is="note", less_is="note")
    found += _change(kernel, was, now, "shared", more_is="note", less_is="better")
    if abs(now.instructions - was.instructions) > REMARKABLE * was.instructions:
        found += _change(kernel, was, now, "instructions", more_is="note", less_is="better")
    return found


def _change(kernel: str, was: Resources, now: Resources, what: str, more_is: str, less_is: str) -> list[Change]:
    before, after = getattr(was, what), getattr(now, what)
    return [] if after == before else [Change(kernel, what, before, after, more_is if after > before else less_is)]


class Baseline:
    """The committed figures, and the versions of the compilers that they come from, by backend."""

    def __init__(self, path: Path = BASELINE) -> None:
        document = json.loads(path.read_text(encoding="utf-8"))
        self.compilers: dict[str, dict[str, str]] = document["compilers"]
        self.kernels = {name: Resources(**row) for name, row in document["kernels"].items()}

    def keys(self, backend: str) -> set[str]:
        """The backend's kernels that have a baseline."""
        return {name.partition("/")[2] for name in self.kernels if name.startswith(f"{backend}/")}

    def compare(
        self, backend: str, found: Mapping[str, Resources], compilers: Mapping[str, str]
    ) -> tuple[list[str], list[str]]:
        """(what fails the gate, what is to be said anyway) of some of a backend's kernels, as lines."""
        remarks = []
        same = self.compilers.get(backend) == dict(compilers)
        if not same:
            remarks.append(
                f"{backend}: the baseline is of {self.compilers.get(backend)}, these kernels of {dict(compilers)}: "
                f"only widths and spills are compared; `{UPDATE}` makes a baseline of these compilers"
            )
        missing = [f"{backend}/{name}: has no baseline; `{UPDATE}` adds it" for name in found if name not in self.keys(backend)]
        changes = []
        for name, now in found.items():
            was = self.kernels.get(f"{backend}/{name}")
            changes += [] if was is None else changes_of(f"{backend}/{name}", was, now, same)
        worse = [change for change in changes if change.verdict == "worse"]
        rest = [change for change in changes if change.verdict != "worse"]
        if any(change.verdict == "better" for change in rest):
            remarks.append(f"{backend}: some kernels became better; `{UPDATE}` holds them to it")
        hint = [f"`{UPDATE}` accepts what is meant"] if worse else []
        return missing + table(worse) + hint, remarks + table(rest)


def table(changes: list[Change]) -> list[str]:
    """One aligned line a change."""
    width = max((len(change.kernel) for change in changes), default=0)
    return [f"{c.kernel:{width}}  {c.what:14}  {c.was:>6} -> {c.now:<6}  {c.verdict}" for c in changes]


def write(kernels: Mapping[str, Resources], compilers: Mapping[str, Mapping[str, str]], path: Path = BASELINE) -> None:
    """Rewrites the baseline, a line a kernel."""
    lines = [f"  {json.dumps(name)}: {json.dumps(asdict(kernels[name]))}" for name in sorted(kernels)]
    head = json.dumps({name: dict(versions) for name, versions in sorted(compilers.items())})
    body = ",\n".join(lines)
    path.write_text(f'{{\n "compilers": {head},\n "kernels": {{\n{body}\n }}\n}}\n', encoding="utf-8")
