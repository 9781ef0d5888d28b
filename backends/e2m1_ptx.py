"""PTX that both backends for NVIDIA embed: eight e2m1 codes of an octet of bf16."""

from __future__ import annotations


def octet_codes(mark: str, *, saturate: bool) -> str:
    """A block of PTX: operand 0 becomes the codes of operands 1 to 4, pairs of bf16, times operand 5, an fp32.

    The products are rounded to fp32; the multiplier holds a factor of 2**-14, so that e2m1's subnormal is one of fp16's and a
    code is the rounded upper bits of an fp16. Two elements a register: i and i + 4, whose codes meet in a byte.

    Args:
        mark: what operands begin with, "%" or "$".
        saturate: products may be larger than 6; else none may be 7 or more.
    """
    o = [f"{mark}{i}" for i in range(6)]
    pairs = (("shl", o[1], o[3]), ("and", o[1], o[3]), ("shl", o[2], o[4]), ("and", o[2], o[4]))
    scaled = [_scaled(take, first, second, o[5], f"c{i}") for i, (take, first, second) in enumerate(pairs)]
    return (
        "{ .reg .b32 a, b, c0, c1, c2, c3, even, odd, t; mov.b32 t, 0x0E000E00; "
        + "".join(scaled)
        + "".join(_rounded(f"c{i}", saturate) for i in range(4))
        + _packed(o[0])
        + "}"
    )


def _scaled(take: str, first: str, second: str, multiplier: str, into: str) -> str:
    """Half `take` ("shl" the lower, "and" the upper one) of two registers, each times a number, as two fp16."""
    operand = {"shl": "16", "and": "0xFFFF0000"}[take]
    return (
        f"{take}.b32 a, {first}, {operand}; {take}.b32 b, {second}, {operand}; "
        f"mul.rn.f32 a, a, {multiplier}; mul.rn.f32 b, b, {multiplier}; cvt.rn.f16x2.f32 {into}, b, a; "
    )


def _rounded(both: str, saturate: bool) -> str:
    """Two fp16 rounded to the nearest even code, then in bits 9 to 11 of its half, below three zeros and the sign."""
    clamped = f"min.xorsign.abs.f16x2 {both}, {both}, t; " if saturate else ""
    lowest = f"shr.u32 a, {both}, 9; and.b32 a, a, 0x00010001; "
    return f"{clamped}{lowest}add.u32 {both}, {both}, a; add.u32 {both}, {both}, 0x00FF00FF; "


def _packed(into: str) -> str:
    """The codes and signs of c0 to c3 side by side: upper bytes gathered, then magnitudes and signs moved to their nibbles."""
    merge = "0x0F0F0F0F, 0xE4"  # the lower nibbles of the first operand, the upper ones of the second
    return (
        "prmt.b32 even, c0, c2, 0x7351; prmt.b32 odd, c1, c3, 0x7351; "
        f"shr.u32 a, even, 1; shl.b32 b, odd, 3; lop3.b32 a, a, b, {merge}; "
        f"shr.u32 b, even, 4; lop3.b32 b, b, odd, {merge}; or.b32 {into}, a, b; "
    )
