"""Is (row, column) visible: one comparison per kind of mask leaf (see `treeattn.masks`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from .emit import Buffer, Expr, broadcast, greater, let

NODE_FIELDS = 3  # enter, exit, depth


@dataclass(frozen=True)
class Column:
    """A column of the sequence and, where it is a node, its row in the table of nodes."""

    index: Expr
    prefix_len: Expr
    node_begin: Expr
    nodes: Buffer
    position_of: Callable[[Expr], Expr]
    """Of a column before the tree."""

    def node(self, field: int, before_tree: Expr) -> Expr:
        """Return a field of the node, or ``before_tree`` for a column that precedes the tree."""
        node = self.index - self.prefix_len
        at = (self.node_begin + greater(node, 0)) * NODE_FIELDS + field
        return let(T.if_then_else(node >= 0, self.nodes[at], before_tree))

    def position(self) -> Expr:
        """Return the position: the prefix by index, a node by depth."""
        return let(self.position_of(T.min(self.index, self.prefix_len)) + self.depth())

    def depth(self) -> Expr:
        """Return the depth of the node, 0 for a column that precedes the tree."""
        return self.node(2, T.int32(0))


def _compare(test: str, column: Column) -> Callable[[Expr, int], Expr]:
    """Emit what the test needs of the column once; the result compares it with bounds of rows."""
    least, most = T.int32(1 - 2**31), T.int32(2**31 - 1)  # no bound is less, and WGSL cannot write -2^31
    if test == "tree":
        enter, leave = column.node(0, least), column.node(1, most)
        return lambda bound, lanes: _and(bound >= broadcast(enter, lanes), bound < broadcast(leave, lanes))
    if test in ("col_below", "pos_below"):
        at = column.index if test == "col_below" else column.position()
        return lambda bound, lanes: broadcast(at, lanes) < bound
    at = column.index if test == "col_from" else column.position()
    return lambda bound, lanes: broadcast(at, lanes) >= bound


def tester(form: tuple[Any, ...], column: Column) -> Callable[[Callable[[int], Expr], int], Expr]:
    """Return ``visible(bound, lanes)``, where ``bound(k)`` gives the rows' bounds of leaf ``k`` (``lanes`` of them)."""
    if form[0] not in "&|":
        compare = _compare(form[0], column)
        return lambda bound, lanes: compare(bound(form[1]), lanes)
    left, right = tester(form[1], column), tester(form[2], column)
    join = _and if form[0] == "&" else _or
    return lambda bound, lanes: join(left(bound, lanes), right(bound, lanes))


def _and(left: Expr, right: Expr) -> Expr:
    return tvm.tirx.And(left, right)


def _or(left: Expr, right: Expr) -> Expr:
    return tvm.tirx.Or(left, right)
