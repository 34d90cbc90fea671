"""Hypothesis strategies: trees, lengths and whole cases. Structure shrinks, values come from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from ..arrays import DTYPES
from ..tree import TokenTree
from .cases import Case, Layout, make_case
from .kinds import Lengths, mask_kinds, shuffled

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
HEAD_DIMS = (1, 2, 7, 8, 16, 46, 64, 80)
PAGE_SIZES = (1, 2, 3, 16, 17, 64)


def seeds() -> st.SearchStrategy[int]:
    """Seeds for ``numpy.random.default_rng``."""
    return st.integers(0, 2**32 - 1)


@st.composite
def trees(draw: st.DrawFn, min_nodes: int = 0, max_nodes: int = 24) -> TokenTree:
    """Forests in any node order; they shrink towards few nodes, all of them roots, in order."""
    num_nodes = draw(st.integers(min_nodes, max_nodes))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    tree = TokenTree.from_parents(np.array(parents, np.int32))
    return shuffled(np.random.default_rng(draw(seeds())), tree) if draw(st.booleans()) else tree


@st.composite
def lengths(
    draw: st.DrawFn, max_seqs: int = 4, max_rows: int = 12, max_context: int = 70, *, tree: bool = False
) -> Lengths:
    """``(q_len, kv_len)`` of each sequence; with ``tree``, ``q_len <= kv_len``."""
    pairs = []
    for _ in range(draw(st.integers(1, max_seqs))):
        q_len, context = draw(st.integers(0, max_rows)), draw(st.integers(0, max_context))
        pairs.append((q_len, q_len + context if tree or draw(st.booleans()) else context))
    return tuple(pairs)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    masks: Sequence[str] | None = None,
    dtypes: Sequence[str] = DTYPES,
    storages: Sequence[Layout] = ("paged", "ragged"),
    max_seqs: int = 4,
    max_context: int = 70,
) -> Case:
    """Cases over mask, storage, lengths, heads, head sizes and dtypes."""
    mask = draw(st.sampled_from(list(mask_kinds()) if masks is None else list(masks)))
    batch = draw(lengths(max_seqs, max_context=max_context, tree="tree" in mask))
    storage, kv_heads, d_qk = (
        draw(st.sampled_from(storages)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(HEAD_DIMS)),
    )
    return make_case(
        np.random.default_rng(draw(seeds())),
        mask=mask,
        lengths=batch,
        dtype=draw(st.sampled_from(dtypes)),
        kv_dtype=draw(st.sampled_from(dtypes)),
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.sampled_from(GROUPS)),
        d_qk=d_qk,
        d_v=draw(st.sampled_from(HEAD_DIMS)) if storage == "ragged" else d_qk,
        storage=storage,
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        logit_scale=draw(st.sampled_from([1.0, 20.0, 200.0])),
    )
