"""RoPE on fused q, k, v: split the rows of a projection, and rotate queries and keys by their positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm.script import tirx as T

from ..checks import integer, positive
from ..errors import ShapeError
from ..kernels.emit import (
    Buffer,
    Expr,
    PrimFunc,
    allocate,
    barrier,
    f32,
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
from ..logits import LARGEST
from ..targets import GpuTraits
from .blocks import Lanes
from .page_ops import copy, elements, spread, stored
from .rotation import TURN, Rotation, constants, cos_sin_of_turns, original_length, rotation
from .target import angle_dtype, check_dtype

Turn = Callable[[Expr], tuple[Expr, Expr]]
"""Cosine and sine of a pair, as float32."""


@dataclass(frozen=True)
class SplitRotary:
    """``(qkv, position_map, q, k, v, apply_rope)``, or for longrope ``ext_factors`` last.

    ``heads`` are those of q, k and v, in their order in a fused row; the rest is as in TVM's factory.
    """

    theta: float
    scale: float
    d: int
    heads: dict[str, int]
    dtype: str
    rope_scaling: dict[str, Any]
    rotary_dim: int
    device: GpuTraits | None

    def __post_init__(self) -> None:
        positive(self.theta, "theta", LARGEST), positive(self.scale, "scale", LARGEST)
        if integer(self.rotary_dim, "rotary_dim", most=integer(self.d, "head_dim")) % 2:
            raise ShapeError(f"rotary_dim: expected an even number, got {self.rotary_dim}; pairs of dims turn together")
        integer(self.heads["q"], "num_q_heads"), integer(self.heads["k"], "num_kv_heads", 0)
        check_dtype(self.dtype, "dtype", self.device)
        _ = self._rotation

    def function(self, name: str) -> PrimFunc:
        """Build the function."""
        return prim_func(name, self._body)

    def _body(self) -> None:
        extended = self.rope_scaling.get("rope_type") == "longrope"
        names = ("qkv", "position_map", "q", "k", "v", *(["ext_factors"] if extended else []))
        handles = {name: tensor(f"var_{name}") for name in names}
        apply = None if extended else scalar("apply_rope", "int64")
        tokens, fused = symbol("int64"), sum(self.heads.values())
        shapes = {"qkv": fused, **self.heads}
        matches = {n: matched(handles[n], (tokens, h, self.d), self.dtype) for n, h in shapes.items()}
        positions = matched(handles["position_map"], (tokens,), "int32", symbol())
        factors = matched(handles["ext_factors"], (self.rotary_dim,), "float32") if extended else None

        def turn(token: Expr, last: Expr, pair: Expr) -> tuple[Expr, Expr]:
            cos, sin = self._cos_sin(positions[token], last, pair, factors)
            if apply is None:
                return cos, sin
            return T.if_then_else(apply > 0, cos, f32(1)), T.if_then_else(apply > 0, sin, f32(0))

        run = self._on_gpu if self.device else self._on_cpu
        run(matches, tokens, positions if extended else None, turn)

    @cached_property
    def _rotation(self) -> Rotation:
        return rotation(self.rope_scaling, self.rotary_dim)

    def _cos_sin(self, position: Expr, last: Expr, pair: Expr, factors: Buffer | None) -> tuple[Expr, Expr]:
        """Return cosine and sine of a pair; ``last``, the greatest position, chooses the factors of longrope."""
        dtype, made = angle_dtype(self.device), self._rotation
        theta = T.cast(T.float64(float(self.theta)), dtype)
        real, frequency = constants(theta), made.frequency(pair, theta)
        if factors is not None:  # the long factors come first
            place = T.if_then_else(last >= original_length(self.rope_scaling), pair, pair + self.rotary_dim // 2)
            frequency = frequency / T.cast(factors[place], dtype)
        turn = T.cast(position, dtype) * real(float(self.scale)) * frequency
        if self.device:
            return cos_sin_of_turns(turn * real(TURN), made.size)
        cos, sin = (T.cast(wave(turn) * real(made.size), "float32") for wave in (T.cos, T.sin))
        return cos, sin

    def _on_cpu(self, matches: dict[str, Buffer], tokens: Expr, positions: Buffer | None, turn: Any) -> None:
        """An angle a pair and token, kept for all heads."""
        half, last = self.rotary_dim // 2, allocate(1, "int32")
        put(last, 0, i32(0))
        if positions is not None:
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

    def _on_gpu(self, matches: dict[str, Buffer], tokens: Expr, positions: Buffer | None, turn: Any) -> None:
        """A block a vector."""
        fused = sum(self.heads.values())

        def vector(i: Expr, lanes: Lanes | None) -> None:
            assert lanes is not None
            token, at = let(T.truncdiv(i, fused)), let(T.truncmod(i, fused))
            last = i32(0) if positions is None else self._greatest(positions, tokens, lanes)
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
        qkv, out = (stored(matches[name], self.dtype, self.device) for name in ("qkv", part))
        fused = sum(self.heads.values())
        source = let((i64(token) * fused + i64(self._firsts[part] + head)) * self.d)
        target = let((i64(token) * self.heads[part] + i64(head)) * self.d)
        if part == "v":
            copy(qkv.buffer, source, out.buffer, target, self.d, lanes)
            return
        half = self.rotary_dim // 2
        with elements(half, lanes) as pair:
            places = (pair, pair + half) if self._rotation.style == "neox" else (2 * pair, 2 * pair + 1)
            cos, sin = (let(value) for value in turn(pair))
            x, y = (let(qkv[source + i64(place)]) for place in places)
            for place, value in zip(places, (x * cos - y * sin, y * cos + x * sin), strict=True):
                out.store(target + i64(place), value)
        if self.d > self.rotary_dim:
            with elements(self.d - self.rotary_dim, lanes) as rest:
                at = let(i64(self.rotary_dim + rest))
                put(out.buffer, target + at, qkv.buffer[source + at])
