"""Reading and writing stored elements on targets that lack some types: every element is float32 in a kernel.

===========  ====================  ==========================================================
stored       the target has        memory is declared as
===========  ====================  ==========================================================
float32                            float32
float16      float16               float16
16 bits      16-bit integers       uint16, converted by integer arithmetic
16 bits      neither (WGSL)        uint32 words of two elements, which can only be read
===========  ====================  ==========================================================
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ..emit import Buffer, Expr, f32, let, put, wide

HALF_INF, FLOAT_INF = 0x7C00, 0x7F800000
MANTISSA_STEP = 13  # bits that a float32 has more than a float16
BIAS_STEP = 112  # of their exponents
SMALLEST_NORMAL = 113 << 23  # 2^-14, the least normal float16, as a float32


def declared(dtype: str, traits: Any) -> str:
    """Return the dtype that memory of ``dtype`` elements is declared with."""
    if dtype == "float32" or (dtype == "float16" and traits.float16):
        return dtype
    return "uint16" if traits.int16 else "uint32"


class Elements:
    """A flat buffer of elements of ``dtype``; indices are of elements, whatever the memory is declared as."""

    def __init__(self, buffer: Buffer, dtype: str, traits: Any) -> None:
        self.buffer, self.dtype, self.index = buffer, dtype, traits.index
        self.memory = declared(dtype, traits)

    def __getitem__(self, at: Expr) -> Expr:
        """Load an element as float32, exactly."""
        if self.memory in ("float32", "float16"):
            return T.cast(self.buffer[at], "float32")
        if self.memory == "uint16":
            return widened(T.cast(self.buffer[at], "uint32"), self.dtype)
        word = self.buffer[T.shift_right(at, wide(1, self.index))]
        shift = T.cast(T.bitwise_and(at, wide(1, self.index)), "uint32") * T.uint32(16)
        return widened(T.bitwise_and(T.shift_right(word, shift), T.uint32(0xFFFF)), self.dtype)

    def store(self, at: Expr, value: Expr) -> None:
        """Store a float32, rounded to nearest even."""
        if self.memory in ("float32", "float16"):
            put(self.buffer, at, T.cast(value, self.memory))
        else:
            put(self.buffer, at, T.cast(_narrowed(value, self.dtype), "uint16"))


def widened(bits: Expr, dtype: str) -> Expr:
    """Return the float32 of 16 bits, given as uint32."""
    bits = let(bits)
    if dtype == "bfloat16":
        return T.reinterpret("float32", T.shift_left(bits, T.uint32(16)))
    sign = T.shift_left(T.bitwise_and(bits, T.uint32(0x8000)), T.uint32(16))
    size = let(T.bitwise_and(bits, T.uint32(0x7FFF)))
    moved = let(T.shift_left(size, T.uint32(MANTISSA_STEP)))
    # A subnormal becomes a normal number one exponent up, less that exponent's power of two: no float32 subnormals.
    small = T.reinterpret("float32", moved + T.uint32(SMALLEST_NORMAL)) - f32(2.0**-14)
    normal = moved + T.uint32(BIAS_STEP << 23)
    special = T.bitwise_or(moved, T.uint32(FLOAT_INF))
    whole = T.Select(size >= T.uint32(HALF_INF), special, normal)
    whole = T.Select(size < T.uint32(0x0400), T.reinterpret("uint32", small), whole)
    return T.reinterpret("float32", T.bitwise_or(whole, sign))


def _narrowed(value: Expr, dtype: str) -> Expr:
    """Return the 16 bits of ``value`` rounded to ``dtype``, as uint32; NaN stays NaN."""
    bits = let(T.reinterpret("uint32", value))
    size = let(T.bitwise_and(bits, T.uint32(0x7FFFFFFF)))
    is_nan = size > T.uint32(FLOAT_INF)
    if dtype == "bfloat16":
        rounded = T.shift_right(bits + T.uint32(0x7FFF) + _odd(bits, 16), T.uint32(16))
        return T.Select(is_nan, T.uint32(0x7FC0), rounded)
    sign = T.bitwise_and(T.shift_right(bits, T.uint32(16)), T.uint32(0x8000))
    # Below 2^-14 adding 0.5 leaves the result, rounded to its last place, in the low bits of the sum.
    small = T.reinterpret("uint32", T.reinterpret("float32", size) + f32(0.5)) - T.uint32(0x3F000000)
    rounded = size - T.uint32(BIAS_STEP << 23) + T.uint32(0x0FFF) + _odd(size, MANTISSA_STEP)
    normal = T.min(T.shift_right(rounded, T.uint32(MANTISSA_STEP)), T.uint32(HALF_INF))
    whole = T.Select(size < T.uint32(SMALLEST_NORMAL), small, normal)
    whole = T.Select(size >= T.uint32(FLOAT_INF), T.Select(is_nan, T.uint32(0x7E00), T.uint32(HALF_INF)), whole)
    return T.bitwise_or(whole, sign)


def _odd(bits: Expr, shift: int) -> Expr:
    return T.bitwise_and(T.shift_right(bits, T.uint32(shift)), T.uint32(1))
