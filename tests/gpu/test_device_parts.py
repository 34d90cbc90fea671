"""Storages, dtypes, logit parts, RoPE and sizes on devices, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from devices import each_target, on
from helpers import attend, rng

import treeattn as ta
from treeattn import api, reference
from treeattn.errors import UnsupportedError
from treeattn.schedules.gpu import TILES
from treeattn.testing import assert_within_budget, make_case

SLOPES = np.array([0.5, 0.25, 0.1, 0.01], np.float32)
SINKS = np.array([1.0, -3.0, 20.0, -np.inf], np.float32)
LONG = [(1, 700), (3, 333), (0, 4), (2, 0), (9, 222), (40, 130)]


def split_plan(case, target, **options):
    """A plan whose keys are split between blocks."""
    q_heads = case.q.shape[1]
    plan = api.plan(
        case.kv, case.mask, q_indptr=case.q_indptr, q_heads=q_heads, dtype=case.q.dtype, sm_scale=case.sm_scale,
        target=target, threads=64, **{**case.parts, **options},
    )  # fmt: skip
    assert plan.num_items > 16
    return plan


@each_target
@pytest.mark.parametrize("storage", ["paged", "ragged"])
def test_split_keys(target, storage):
    case = make_case(rng(), mask="causal", lengths=LONG, q_heads=6, storage=storage)
    assert_within_budget(*split_plan(case, target).run(case.q), case)


PARTS = {
    "neox": {"rope": ta.Rope(theta=1e4)},
    "gptj part": {"rope": ta.Rope(theta=1e4, style="gptj", rotary_dim=8)},
    "every part": {"softcap": 50.0, "alibi": SLOPES, "sink_logits": SINKS, "rope": ta.Rope(theta=1e4, rotary_dim=8)},
}


@pytest.mark.parametrize(("target", "parts"), [*(on("opencl", name) for name in PARTS), on("webgpu", "every part")])
def test_logit_parts(target, parts):
    """Whole and split: a sink logit counts once."""
    case = replace(make_case(rng(), mask="tree&(window|sink)", logit_scale=20.0), parts=PARTS[parts])
    assert_within_budget(*attend(case, target=target), case)
    if parts == "every part":
        case = replace(make_case(rng(), mask="causal", lengths=LONG, logit_scale=20.0), parts=PARTS[parts])
        assert_within_budget(*split_plan(case, target).run(case.q), case)


DTYPES = [
    on("opencl", "float16", "float16"),
    on("opencl", "bfloat16", "bfloat16"),
    on("opencl", "float32", "float16"),
    on("webgpu", "float16", "bfloat16"),
    on("webgpu", "float32", "float16"),
]


@pytest.mark.parametrize(("target", "dtype", "kv_dtype"), DTYPES)
def test_dtypes(target, dtype, kv_dtype):
    """Converted by integer arithmetic where the device lacks them."""
    case = make_case(rng(1), mask="tree", dtype=dtype, kv_dtype=kv_dtype)
    assert_within_budget(*attend(case, target=target), case)


def latent_case(**moves):
    """A latent cache of 40 elements, of which 32 are the value."""
    lengths, page_size = [(3, 41), (0, 5), (6, 30), (0, 0), (1, 33)], 8
    kv_len = np.array([kv for _, kv in lengths])
    pages_of = -(-kv_len // page_size)
    page_indptr = np.concatenate([[0], np.cumsum(pages_of)])
    page_ids = rng().permutation(page_indptr[-1] + 3)[: page_indptr[-1]]
    pages = rng(1).standard_normal((page_indptr[-1] + 3, page_size, 40)).astype(np.float32)
    last = np.where(kv_len > 0, (kv_len - 1) % page_size + 1, 0)
    for seq in range(len(lengths)):
        if pages_of[seq]:
            pages[page_ids[page_indptr[seq + 1] - 1], last[seq] :] = np.nan
    kv = ta.LatentKV(pages, page_indptr, page_ids, last, d_latent=32, **moves)
    made = make_case(
        rng(2), mask="causal&(window|sink)", lengths=lengths, d_qk=40, q_heads=5, kv_heads=1, logit_scale=9
    )
    return replace(made, kv=kv)


@each_target
def test_latent_cache_with_dropped_tokens(target):
    case = latent_case(kept=[2, 0, 3, 0, 4], dropped=[7, 0, 100, 0, 3])
    assert_within_budget(*attend(case, target=target), case)


SIZES = {
    "T13 group 7, d 512, decode": {"lengths": [(1, 60), (1, 5)], "d_qk": 512, "q_heads": 14, "kv_heads": 2},
    "group 71, d 8": {"d_qk": 8, "q_heads": 71, "kv_heads": 1, "page_size": 3},
    "d 46, page 1": {"d_qk": 46, "q_heads": 9, "kv_heads": 3, "page_size": 1},
    "latent sizes": {"d_qk": 576, "d_v": 512, "q_heads": 16, "kv_heads": 1, "storage": "ragged", "lengths": [(2, 40)]},
}


@pytest.mark.parametrize(
    ("target", "size"), [*(on("opencl", name) for name in SIZES), on("webgpu", "T13 group 7, d 512, decode")]
)
def test_sizes(target, size):
    case = make_case(rng(), mask="causal", **SIZES[size])
    assert_within_budget(*attend(case, target=target), case)


@each_target
@pytest.mark.parametrize("rows", [1, 3, 5, 31, 33])
def test_t15_rows_that_fill_no_tile(target, rows):
    """Padded rows of a last tile read what is theirs: the next sequence's rows see other columns."""
    case = make_case(rng(rows), mask="tree", lengths=[(rows, rows + 9), (4, 70)], q_heads=1, kv_heads=1)
    assert_within_budget(*attend(case, target=target), case)


@each_target
def test_nan_and_infinities_that_nobody_sees(target):
    """In keys and values of a sibling, in a partial block and a split tile."""
    tree = ta.TokenTree.from_parents([-1, 0, 0, 1, 2])
    case = make_case(rng(), trees=[tree], contexts=[130])
    k, v = (np.array(part, np.float32) for part in reference.gather(case.kv, 0))
    clean = ta.RaggedKV(k.copy(), v.copy(), [0, len(k)])
    for column, bad in ((132, np.nan), (134, np.inf)):  # node 2 and its child, which nodes 1 and 3 do not see
        k[column], v[column] = bad, bad
    dirty = ta.RaggedKV(k, v, [0, len(k)])
    unharmed = [0, 1, 3]
    got, want = (ta.attention(case.q, kv, case.mask, target=target) for kv in (dirty, clean))
    for one, other in zip(got, want, strict=True):
        assert np.array_equal(one[unharmed], other[unharmed])
    assert np.isnan(got[0][2]).all()


@each_target
def test_visible_logits_below_any_threshold(target):
    """T6: a visible logit of -90,000 beats a masked one."""
    k = np.full((2, 1, 4), -3e2, np.float32)
    v = np.array([1.0, 7.0], np.float32).reshape(2, 1, 1)
    out, lse = ta.attention(
        np.full((1, 1, 4), 75, np.float32), ta.RaggedKV(k, v, [0, 2]), ta.ValidLength([1]), target=target, sm_scale=1.0
    )
    assert out.item() == 1
    assert np.isclose(lse.item(), -9e4 * np.log2(np.e))


@pytest.mark.skipif(on("webgpu").marks[0].args[0], reason=on("webgpu").marks[0].kwargs["reason"])
def test_dtypes_a_device_cannot_write_are_refused():
    case = make_case(rng(), dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="bfloat16 output"):
        attend(case, target="webgpu")


@pytest.mark.parametrize("target", [on("opencl")])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows} rows")
def test_every_tile(target, tile, monkeypatch):
    from treeattn import compiler

    monkeypatch.setattr(compiler, "choose", lambda *_: tile)
    for seed in range(2):
        case = make_case(rng(seed), mask="tree&window", d_qk=48)
        assert_within_budget(*attend(case, target=target), case)
