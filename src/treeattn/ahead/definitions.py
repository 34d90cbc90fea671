"""What every argument of a kernel and every part of a plan means, in words and formulas: data, for manifests.

Names in formulas: ``num_seqs q_total q_heads kv_heads group = q_heads / kv_heads page_size num_items`` and the like;
sequence ``b`` has ``q_len[b]`` query tokens, ``kv_len[b]`` columns (keys) and ``num_nodes[b]`` nodes in its tree, and
``prefix_len[b] = kv_len[b] - num_nodes[b]``. A *row* is a (query token, head of the group) pair of one kv head, token
first: row ``r`` of a sequence is its token ``r / group`` and query head ``kv_head * group + r % group``.
"""

from __future__ import annotations

from typing import Any

ITEMS = {
    "kind": "index in tile.few of the least entry that holds num_rows, or len(tile.few) for more rows",
    "state": "index of the partial state to write, or -1 to write out and lse",
    "seq": "sequence",
    "head": "kv head",
    "row_begin": "first row of the tile within its sequence",
    "num_rows": "rows of the tile, 1 to tile.rows",
    "span_begin": "first of its spans",
    "span_end": "one past the last of its spans",
}
CPU_ITEM = ("kind", "seq", "head", "row_begin", "num_rows", "span_begin", "span_end")
GPU_ITEM = ("state", *CPU_ITEM[1:])
MERGE = {
    "state": "state_begin again; not read",
    **{name: ITEMS[name] for name in CPU_ITEM[1:5]},
    "state_begin": "first partial state of the tile",
    "state_end": "one past its last partial state; the states of a tile are consecutive, in the order of its columns",
}
SEQ = {
    "q_begin": "q_indptr[b], its first query token",
    "page_begin": "page_indptr[b], its first entry of page_ids",
    "prefix_len": "kv_len[b] - num_nodes[b], columns before its tree; kv_len[b] without one",
    "node_begin": "its first entry of nodes: the sum of num_nodes before it; 0 without trees",
    "position_begin": "position of column 0; read only by a kernel whose spec has moved, and so the next three",
    "kept": "columns from here on have moved",
    "gap": "further positions of a column that has moved",
    "skip": "further slots of a column that has moved",
}
SPAN = {
    "begin": "first column",
    "end": "one past the last column",
    "full": "1 if every row of the tile sees every column of the span; else 0, and each column is tested",
}
NODE = {
    "enter": "place of the node in a depth-first walk of its forest, counted from 0",
    "exit": "one past the places of its descendants: a is b or above it iff enter[a] <= enter[b] < exit[a]",
    "depth": "0 for a root, else one more than the parent's",
}
TESTS = {
    "full": ("always", "0"),
    "tree": (
        "the column precedes the tree, or enter[column] <= bound < exit[column]",
        "enter of the row's node; the rows of a sequence are the last q_len nodes of its tree, in order",
    ),
    "col_below": (
        "column < bound",
        "causal: kv_len - q_len + i + 1 for row token i; valid_length n: n, or 0 for a token at or past n",
    ),
    "col_from": ("column >= bound", "padded_left n: kv_len - n, or kv_len for one of the first q_len - n tokens"),
    "pos_from": ("position of the column >= bound", "window of w: position of the row token - w + 1"),
    "pos_below": ("position of the column < bound", "sink of s: s"),
}
"""By test of a mask's form: when a row sees a column, and its bound. A column's position is its index before the tree,
``prefix_len + depth`` in it."""
PARTS: dict[str, tuple[str, str]] = {
    "items": ("num_items, 7", "work: row tiles times kv heads; every row of every kv head lies in exactly one tile"),
    "merges": ("num_merges, 7", "one for each tile whose columns were split over several items, else none"),
    "item_indptr": ("threads + 1", "thread t runs items item_indptr[t] to item_indptr[t + 1]"),
    "seqs": ("num_seqs, 8", "one row for each sequence"),
    "spans": (
        "num_spans + 1, 3",
        "the columns that tiles visit: those of a tile are disjoint and rising and hold every column some row of it "
        "sees; one span (0, kv_len, 0) is always right, narrower and full ones are faster; "
        "the last one is a spare, zeros",
    ),
    "page_ids": (
        "page_indptr[num_seqs]",
        "position p of sequence b is slot p % page_size of page page_ids[page_indptr[b] + p / page_size]; for keys "
        "without pages: page_size 2147483647, one entry a sequence, its first row of k",
    ),
    "bounds": ("num_leaves, bounds_stride", "bound of each query token for each leaf of the mask"),
    "nodes": ("num_nodes, 3", "the nodes of all trees, sequence by sequence; empty without trees"),
    "positions": (
        "q_total",
        "position of each query token: prefix_len + depth in a tree, else kv_len - q_len + i; read only with rope or "
        "alibi",
    ),
    "rope_low": (
        "1024, 2, rotary_dim / 2",
        "row r: cosines, then sines, of r * inv_freq, times the attention factor; read only with rope",
    ),
    "rope_high": (
        "last_position / 1024 + 1, 2, rotary_dim / 2",
        "row h: cosines, then sines, of 1024 * h * inv_freq; read only with rope",
    ),
    "alibi": ("q_heads", "slopes; read only with alibi"),
    "sink_logits": ("q_heads", "logits in natural units; read only with sink_logits"),
}
"""By name: shape and meaning, of the CPU's arrays and of the parts of a GPU's ``plan`` and ``tables``."""
FIELDS = {"items": ITEMS, "merges": MERGE, "seqs": SEQ, "spans": SPAN, "nodes": NODE}
LAYER: dict[str, tuple[str, str]] = {
    "q": ("q_total, q_heads, d_qk", "queries; head dimension contiguous"),
    "k": ("num_pages, kv_heads, page_size, d_qk", "keys; any order of axes, head dimension contiguous"),
    "v": ("num_pages, kv_heads, page_size, d_v", "values, likewise; may lie in the memory of k"),
    "out": ("q_total, q_heads, d_v", "result; head dimension contiguous"),
    "lse": ("q_total, q_heads", "base-2 log-sum-exp; -inf for a row that sees nothing; contiguous heads"),
}
SCRATCH: dict[str, tuple[str, str]] = {
    "workspace": ("threads * workspace_floats", "scratch memory, 64-byte aligned; needs no initial value"),
    "row_bounds": ("threads * num_leaves * max(tile.rows, 8)", "scratch memory; needs no initial value"),
    "partial": (
        "num_states * tile.rows * (d_v + 2)",
        "partial states of split tiles, num_states being one past the largest state of an item: a row has d_v sums, "
        "its maximum and its denominator; never read if nothing is split",
    ),
}
PACKED: dict[str, tuple[str, str]] = {
    "plan": ("plan_size", "the integers of the plan: a header, then its parts; see packed.plan"),
    "tables": ("tables_size", "the floats of the plan: a header, then its parts; see packed.tables"),
}
CAP = "softcap * log2(e); log2(e) without a soft-cap"
SCALARS: dict[str, str] = {
    "num_blocks": "blocks of the launch: num_items, or num_merges for merge",
    "threads": "parts that the items are dealt to: entries of item_indptr less one",
    "group": "q_heads / kv_heads",
    "q_heads": "query heads",
    "page_size": "slots of a page; 2147483647 for keys without pages",
    "bounds_stride": "elements between the bounds of two leaves: q_total + 8, the last eight zeros",
    "sm_scale": "factor of q . k; usually 1 / sqrt(d_qk)",
    "cap_limit": CAP,
    "cap_inverse": "1 / cap_limit",
    "minus_infinity": "-inf, which WGSL cannot write",
    "lse_token": "elements between two tokens of lse",
    **{f"{name}_at": f"element of {name} where its array begins" for name in ("q", "k", "v", "out")},
    **{f"{name}_token": f"elements between two tokens of {name}" for name in ("q", "out")},
    **{f"{name}_{step}": f"elements between two {step}s of {name}" for name in "kv" for step in ("page", "slot")},
    **{f"{name}_head": f"elements between two heads of {name}" for name in ("q", "k", "v", "out")},
}
WRITTEN = ("out", "lse", "workspace", "row_bounds", "partial")


def argument(name: str, dtype: str) -> dict[str, Any]:
    """Return what a manifest says of an argument."""
    if name in SCALARS:
        return {"name": name, "kind": "scalar", "dtype": dtype, "meaning": SCALARS[name]}
    for role, table in (("layer", LAYER), ("plan", PARTS), ("scratch", SCRATCH), ("packed", PACKED)):
        if name in table:
            shape, meaning = table[name]
            access = "read_write" if name in WRITTEN else "read"
            return {
                "name": name, "kind": "buffer", "dtype": dtype, "role": role, "shape": shape, "access": access,
                "meaning": meaning,
            }  # fmt: skip
    raise KeyError(name)


def part(name: str, item: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a manifest says of an array of a plan; ``item`` names the fields of an item."""
    shape, meaning = PARTS[name]
    found: dict[str, Any] = {"name": name, "shape": shape, "meaning": meaning}
    if fields := FIELDS.get(name):
        found["fields"] = {field: fields[field] for field in (item if name == "items" else fields)}
    return found
