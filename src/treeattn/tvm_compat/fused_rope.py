"""RoPE on fused q, k, v: split the rows of a projection, and rotate queries and keys by their positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ..kernels.emit import (
    Buffer,
    Expr,
    PrimFunc,
    allocate,
    barrier,
    f32,
    flattened,
    i32,
    i64,
    let,
    loop,
    matched,
    parallel,
    prim_func,
    private,
    put,
    scalar,
    shared,
    symbol,
    tensor,
    when,
)
from ..kernels.gpu.arguments import extent_of
from ..targets import GpuTraits
from .blocks import Lanes
from .page_ops import copy, elements, spread
from .rotation import TURN, constants, cos_sin_of_turns, rotation
from .target import angle_dtype

Turn = Callable[[Expr], tuple[Expr, Expr]]
"""Cosine and sine of a pair, as float32."""


def split_rotary(
    theta: float,
    scale: float,
    d: int,
    heads: dict[str, int],
    dtype: str,
    rope_scaling: dict[str, Any],
    rotary_dim: int,
    device: GpuTraits | None,
) -> PrimFunc:
    """Build the function for a ``rope_scaling`` dictionary; ``heads`` of q, k and v, in their order in a fused row."""
    made = rotation(rope_scaling, rotary_dim)
    extended = rope_scaling.get("rope_type") == "longrope"
    length = int(rope_scaling.get("original_max_position_embeddings", 0))

    def cos_sin(pair: Expr, position: Expr, factors: Any, last: Expr) -> tuple[Expr, Expr]:
        wide = angle_dtype(device)
        base = T.cast(T.float64(theta), wide)
        real, frequency = constants(base), made.frequency(pair, base)
        if extended:  # the long factors come first
            place = T.if_then_else(last >= length, pair, pair + rotary_dim // 2)
            frequency = frequency / T.cast(factors[place], wide)
        turn = T.cast(position, wide) * real(scale) * frequency
        if device:
            return cos_sin_of_turns(turn * real(TURN), made.size)
        cos, sin = (T.cast(wave(turn) * real(made.size), "float32") for wave in (T.cos, T.sin))
        return cos, sin

    return SplitRotary(heads, d, dtype, rotary_dim, made.style, cos_sin, extended, device).function("fused_rope")


@dataclass(frozen=True)
class SplitRotary:
    """``(qkv, position_map, q, k, v, apply_rope)``, or ``ext_factors`` last.

    ``cos_sin(pair, position, factors, last)`` gives the angle of a pair; ``last`` is the greatest position.
    """

    heads: dict[str, int]
    d: int
    dtype: str
    rotary_dim: int
    style: str
    cos_sin: Callable[[Expr, Expr, Buffer | None, Expr], tuple[Expr, Expr]]
    extended: bool
    device: GpuTraits | None

    def function(self, name: str) -> PrimFunc:
        """Build the function."""
        return prim_func(name, self._body)

    def _body(self) -> None:
        names = ("qkv", "position_map", "q", "k", "v", *(["ext_factors"] if self.extended else []))
        handles = {name: tensor(f"var_{name}") for name in names}
        apply = None if self.extended else scalar("apply_rope", "int64")
        tokens, fused = symbol("int64"), sum(self.heads.values())
        shapes = {"qkv": fused, **self.heads}
        matches = {n: matched(handles[n], (tokens, h, self.d), self.dtype) for n, h in shapes.items()}
        positions = matched(handles["position_map"], (tokens,), "int32", symbol())
        factors = matched(handles["ext_factors"], (self.rotary_dim,), "float32") if self.extended else None

        def turn(token: Expr, last: Expr, pair: Expr) -> tuple[Expr, Expr]:
            cos, sin = self.cos_sin(pair, positions[token], factors, last)
            if apply is None:
                return cos, sin
            return T.if_then_else(apply > 0, cos, f32(1)), T.if_then_else(apply > 0, sin, f32(0))

        run = self._on_gpu if self.device else self._on_cpu
        run(matches, tokens, positions, turn)

    def _on_cpu(self, matches: dict[str, Buffer], tokens: Expr, positions: Buffer, turn: Any) -> None:
        """An angle a pair and token, kept for all heads."""
        half, last = self.rotary_dim // 2, allocate(1, "int32")
        put(last, 0, i32(0))
        if self.extended:
            with loop(tokens) as token:
                put(last, 0, T.max(last[0], positions[token]))
        with parallel(tokens) as token:
            angles = allocate(2 * half, "float32")
            with loop(half) as pair:
                for place, value in enumerate(turn(token, last[0], pair)):
                    put(angles, place * half + pair, value)
            for part, heads in self.heads.items():
                with loop(heads) as head:
                    self._row(matches, part, token, head, lambda pair: (angles[pair], angles[half + pair]), None)

    def _on_gpu(self, matches: dict[str, Buffer], tokens: Expr, positions: Buffer, turn: Any) -> None:
        """A block a vector."""
        fused = sum(self.heads.values())

        def vector(i: Expr, lanes: Lanes | None) -> None:
            assert lanes is not None
            token, at = let(T.truncdiv(i, fused)), let(T.truncmod(i, fused))
            last = self._greatest(positions, tokens, lanes) if self.extended else i32(0)
            for part, first in self._firsts.items():
                with when(T.And(at >= first, at < first + self.heads[part])):
                    self._row(matches, part, token, let(at - first), lambda pair: turn(token, last, pair), lanes)

        spread(self.device, tokens * fused, -(-self.d // 2), vector)

    @property
    def _firsts(self) -> dict[str, int]:
        """The first head of each part in a fused row."""
        return {"q": 0, "k": self.heads["q"], "v": self.heads["q"] + self.heads["k"]}

    def _greatest(self, positions: Buffer, tokens: Expr, lanes: Lanes) -> Expr:
        """Return the greatest position, found by a block's threads together."""
        greatest, of_threads = private(1, "int32"), shared(lanes.count, "int32")
        put(greatest, 0, i32(0))
        with lanes.elements(T.cast(tokens, "int32")) as token:
            put(greatest, 0, T.max(greatest[0], positions[token]))
        put(of_threads, lanes.thread, greatest[0])
        barrier()
        with loop(lanes.count) as thread:
            put(greatest, 0, T.max(greatest[0], of_threads[thread]))
        return let(greatest[0])

    def _row(
        self, matches: dict[str, Buffer], part: str, token: Expr, head: Expr, turn: Turn, lanes: Lanes | None
    ) -> None:
        """Copy a vector of a part, rotated unless it is a value."""
        extent = extent_of(self.device)
        qkv, out = (flattened(matches[name], self.dtype, extent=extent) for name in ("qkv", part))
        fused = sum(self.heads.values())
        source = let((i64(token) * fused + i64(self._firsts[part] + head)) * self.d)
        target = let((i64(token) * self.heads[part] + i64(head)) * self.d)
        if part == "v":
            copy(qkv, source, out, target, self.d, lanes)
            return
        half = self.rotary_dim // 2
        with elements(half, lanes) as pair:
            places = (pair, pair + half) if self.style == "neox" else (2 * pair, 2 * pair + 1)
            cos, sin = (let(value) for value in turn(pair))
            x, y = (let(T.cast(qkv[source + i64(place)], "float32")) for place in places)
            for place, value in zip(places, (x * cos - y * sin, y * cos + x * sin), strict=True):
                put(out, target + i64(place), value.astype(self.dtype))
        if self.d > self.rotary_dim:
            with elements(self.d - self.rotary_dim, lanes) as rest:
                at = let(i64(self.rotary_dim + rest))
                put(out, target + at, qkv[source + at])
