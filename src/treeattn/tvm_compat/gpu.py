"""TVM's attention functions on GPUs: blocks find their own work, since lengths and page tables are in device memory.

The host knows shapes alone. It launches as many blocks as the row tiles of the batch may need; each block finds its
sequence and rows, works out its spans of columns, and runs a row tile of the package. Keys that are rotated as they are
read (``rotary_mode``) have a kernel of their own, which the host chooses: the other one pays nothing for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tvm.script import tirx as T

from ..kernels.emit import (
    Buffer,
    Expr,
    PrimFunc,
    all_of,
    barrier,
    either,
    flat,
    greater,
    i32,
    let,
    loop,
    prim_func,
    private,
    put,
    shared,
    smaller,
    when,
    while_,
    wide,
)
from ..kernels.gpu import attention, mma, ptx
from ..kernels.gpu.arguments import TileArguments, extent_of
from ..kernels.gpu.elements import declared
from ..kernels.predicates import Column
from ..kernels.spec import KernelSpec
from ..kernels.walk import SPAN_FIELDS, Moves, Tile
from ..schedules.gpu import choose
from ..schedules.mma import MmaTile
from ..targets import GpuTraits
from .attention import Attention, Call, is_above, strides, value_offset
from .blocks import held, over_blocks
from .rotation import TURN, Rotation, constants, cos_sin_of_turns
from .spans import MOST_SPANS, store_spans, tile_spans
from .target import angle_dtype

MOST_BINDINGS = {"webgpu": 10}
"""Arrays that TVM's runtime lets a kernel bind."""
MANY_ROWS = 1000
NEGATIVE_INFINITY = 0xFF800000


def attention_function(made: Attention, traits: GpuTraits) -> PrimFunc:
    """Build an attention function for a GPU.

    Raises
    ------
    UnsupportedError
        No tile is legal for its dimensions; the message gives the reasons.
    """

    def body() -> None:
        call = Call(made.kind, made.heads)
        plain, turning = (partial(_launch, made, call, traits, rotated=rotated) for rotated in (False, True))
        if made.rotates(call, MOST_BINDINGS.get(traits.kind, math.inf)):
            either(call["rotary_mode"] == 1, turning, plain)
        else:
            plain()

    return prim_func(made.name, body)


def _launch(made: Attention, call: Call, traits: GpuTraits, *, rotated: bool) -> None:
    spec, heads = made.spec(rotated=rotated), made.heads
    room = replace(traits, shared_bytes=traits.shared_bytes - (8 * spec.d_qk // 2 if rotated else 0))
    config = choose(spec, room, heads.group if made.kind == "decode" else MANY_ROWS)
    template, arena = (mma, config.shared_bytes(spec, traits)) if isinstance(config, MmaTile) else (attention, 0)
    grid = BlockGrid(call, config.rows)
    with over_blocks(grid.size, config.threads, arena_bytes=arena) as (block, thread):
        args = BlockArguments(made, spec, traits, call, thread, config.threads)
        b, head, row_begin, found = grid.find(block)
        with when(found):
            template.RowTile(spec, config, args, args.tile(b, head, row_begin, config.rows), thread).run()


class BlockGrid:
    """Blocks of a launch: one for every row tile and kv head.

    Tiles of sequence ``b`` are numbered from ``q_indptr[b] * group // rows + b`` on, which leaves room for its last
    one and is found by bisection; where all sequences are of one length, from ``b`` times their tiles on.
    """

    def __init__(self, call: Call, rows: int) -> None:
        self.call, self.rows, self.group = call, rows, call.heads.group
        self.each = None if "q_indptr" in call else T.truncdiv(call.q_len * self.group + (rows - 1), rows)
        tiles = self._begin(call.num_seqs, call.q_total) if self.each is None else self.each * call.num_seqs
        self.size = let(tiles * call.heads.kv_heads)

    def _begin(self, b: Expr, q_begin: Expr) -> Expr:
        return T.truncdiv(q_begin * self.group, self.rows) + b

    def find(self, block: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """Return a block's sequence, kv head and first row, and whether there is such a row."""
        index, head = (let(f(block, self.call.heads.kv_heads)) for f in (T.truncdiv, T.truncmod))
        b = let(self._bisect(index) if self.each is None else T.truncdiv(index, self.each))
        q_begin, q_len = self.call.rows_of(b)
        first = self._begin(b, q_begin) if self.each is None else b * self.each
        row_begin = held((index - first) * self.rows)
        return held(b), held(head), row_begin, row_begin < q_len * self.group

    def _bisect(self, index: Expr) -> Expr:
        edges = private(2, "int32")
        put(edges, 0, i32(0))
        put(edges, 1, self.call.num_seqs)
        with while_(edges[1] - edges[0] > 1):
            middle = let(T.truncdiv(edges[0] + edges[1], 2))
            below = let(self._begin(middle, self.call["q_indptr"][middle]) <= index)
            put(edges, 0, T.Select(below, middle, edges[0]))
            put(edges, 1, T.Select(below, edges[1], middle))
        return edges[0]


class BlockArguments(TileArguments):
    """The arguments of TVM's function, as a block's row tile sees them; made within `launch`."""

    def __init__(
        self, made: Attention, spec: KernelSpec, traits: GpuTraits, call: Call, thread: Expr, threads: int
    ) -> None:
        super().__init__(spec, traits, _memory(call, traits))
        self.made, self.call = made, call
        self.spans, self.count = private(MOST_SPANS * SPAN_FIELDS, "int32"), private(1, "int32")
        self.page_size, self.q_heads, self.sm_scale = call.heads.page_size, call.heads.q_heads, made.scale(call)
        bits = private(1, "uint32")
        put(bits, 0, T.uint32(NEGATIVE_INFINITY))
        self.minus_infinity = T.reinterpret("float32", bits[0])  # WGSL cannot write one
        self.depths = Depths(call) if "tree" in made.leaves else None
        if spec.rope and made.rope:
            self.positions = call["q_rope_position"]
            self.angle_size, self.turns = made.rope.size, _turns(made.rope, call, traits, thread, threads)

    def tile(self, b: Expr, head: Expr, row_begin: Expr, rows: int) -> Tile:
        """Return a tile of up to ``rows`` rows, and write its spans."""
        group = self.call.heads.group
        seq = self.made.sequence(self.call, b, self.depths, moved=self.spec.moved)
        num_rows = held(smaller(seq.q_len * group - row_begin, i32(rows)))
        first, last = (let(T.truncdiv(row, group)) for row in (row_begin, row_begin + num_rows - 1))
        put(self.count, 0, i32(0))
        store_spans(tile_spans(list(self.made.leaves), seq, first, last), self.spans, self.count, 0)
        self.b, self.seq = b, seq
        moves = Moves(*seq.moves) if seq.moves else None
        return Tile(
            i32(-1), head, row_begin, num_rows, i32(0), let(self.count[0]), seq.q_begin, seq.page_begin,
            seq.prefix_len, seq.node_begin, moves, i32(group),
        )  # fmt: skip

    def page_id(self, tile: Tile, page: Expr) -> Expr:
        """Return where a page of the sequence lies; without pages, its first row."""
        if "page_values" in self.call:
            return self.call["page_values"][tile.page_begin + page]
        return self.call["kv_indptr"][self.b] if "kv_indptr" in self.call else self.b * self.call.kv_len

    def column(self, tile: Tile, index: Expr) -> Column:
        """Return a column for the tests of the mask."""
        known = index, tile.prefix_len, tile.node_begin, self.spans, tile.position_of
        return NodeColumn(*known, b=self.b, depths=self.depths) if self.depths else Column(*known)

    def bound(self, tile: Tile, leaf: int, token: Expr) -> Expr:
        """Return the bound of a query token for a leaf of the mask."""
        return self.seq.bounds(token - tile.q_begin)[leaf]

    def is_aligned(self, name: str, elements: int) -> Expr:
        """Return whether all vectors of an argument begin at multiples of ``elements``, in memory too."""
        low_bits = T.bitwise_and(ptx.address(self.values[name]), T.uint64(elements * 2 - 1))
        return let(all_of(super().is_aligned(name, elements), low_bits == T.uint64(0)))

    def angle(self, position: Expr) -> Turn:
        """Return the angle of a position."""
        return Turn(self.turns, position, self.angle_size)


@dataclass(frozen=True)
class Depths:
    """Depths of nodes, counted where they are asked for."""

    call: Call

    def depth(self, b: Expr, node: Expr) -> Expr:
        """Return the depth of a node of sequence ``b``; 0 for a column before its tree."""
        begin, end = (let(self.call["tree_indptr"][b + i]) for i in range(2))
        count = private(1, "int32")
        put(count, 0, i32(0))
        with when(node >= begin), loop(begin, end) as above:
            put(count, 0, count[0] + T.Select(is_above(self.call["tree"], above, node), i32(1), i32(0)))
        return let(count[0])


@dataclass(frozen=True, kw_only=True)
class NodeColumn(Column):
    """A column of a sequence with a tree, whose nodes TVM keeps as ``(enter, exit)``."""

    b: Expr
    depths: Depths

    def node(self, field: int, before_tree: Expr) -> Expr:
        """Return a field of the node, or ``before_tree`` for a column that precedes the tree."""
        node = self.index - self.prefix_len
        tree, at = self.depths.call["tree"], self.node_begin + greater(node, 0)
        return let(T.if_then_else(node >= 0, tree[at, field], before_tree))

    def depth(self) -> Expr:
        """Return the depth of the node, 0 for a column that precedes the tree."""
        return self.depths.depth(self.b, let(self.node_begin + self.index - self.prefix_len))


@dataclass(frozen=True)
class Turn:
    """The angle of a position, from a table of turns per position by pair."""

    turns: Buffer
    position: Expr
    size: float

    def cos_sin(self, pair: Expr, lanes: int) -> tuple[Expr, Expr]:
        """Return cosine and sine of a pair: of what is left of whole turns, which float32 holds."""
        return cos_sin_of_turns(T.cast(self.position, self.turns.ty.dtype) * self.turns[pair], self.size)


def _turns(rope: Rotation, call: Call, traits: GpuTraits, thread: Expr, threads: int) -> Buffer:
    """Fill the table of turns per position."""
    dtype, half = angle_dtype(traits), rope.rotary_dim // 2
    table = shared(half, dtype)
    scale, theta = (T.cast(call[f"rope_{name}"], dtype) for name in ("scale", "theta"))
    with loop(-(-half // threads)) as step:
        pair = let(thread + step * threads)
        with when(pair < half):
            put(table, pair, rope.frequency(pair, theta) * scale * constants(theta)(TURN))
    barrier()
    return table


def _memory(call: Call, traits: GpuTraits) -> dict[str, Any]:
    """Arrays, and where their vectors lie, by the names of `TileArguments`."""
    h, index = call.heads, traits.index
    extent = extent_of(traits)
    values: dict[str, Any] = {name: wide(size, index) for name, size in strides(call).items()}
    values |= dict.fromkeys(("q_at", "out_at", "k_at", "v_at"), wide(0, index))
    arrays = {"q": "q", "out": "output", "lse": "lse", "k": "k", "v": "v"}
    if "pages" in call:
        arrays |= {"k": "pages", "v": "pages"}
        values["k_at"] = T.cast(call["pages"].ty.elem_offset, index)
        values["v_at"] = values["k_at"] + wide(value_offset(call), index)
    for name, at in arrays.items():
        dtype = "float32" if at == "lse" and not call.kind.startswith("dense") else h.dtype
        values[name] = flat(call[at].data, declared(dtype, traits), extent)
    return values
