"""RoPE, logit parts, latent storage and dropped pages, alone and together, against the oracle and against decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import DTYPES, assert_same, attend, parents_first, rng
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn as ta
from treeattn.arrays import numpy_dtype
from treeattn.testing import Case, assert_within_budget, gather_path, make_case, random_forest

SLOPES = np.float32([0.1, 0.5, 1.0, 2.0])
SINKS = np.float32([-3.0, 0.0, 4.0, -np.inf])
ROPES = {
    "neox": ta.Rope(),
    "gptj": ta.Rope(style="gptj"),
    "partial": ta.Rope(rotary_dim=6),
    "partial gptj": ta.Rope(style="gptj", rotary_dim=10, scale=0.5),
    "llama3": ta.Rope(5e5, scaling=ta.RopeScaling.llama3(8.0, 1.0, 4.0, 8192)),
    "yarn": ta.Rope(scaling=ta.RopeScaling.yarn(16.0, 64)),
    "linear": ta.Rope(scaling=ta.RopeScaling.linear(4.0)),
    "dynamic": ta.Rope(scaling=ta.RopeScaling.dynamic(4.0, 32)),
}
PARTS = {
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": SLOPES},
    "sinks": {"sink_logits": SINKS},
    "cap and alibi": {"softcap": 30.0, "alibi": SLOPES},
    "all": {"softcap": 5.0, "alibi": SLOPES, "sink_logits": SINKS, "rope": ROPES["neox"]},
} | {f"rope {name}": {"rope": rope} for name, rope in ROPES.items()}
MASKS = ["full", "causal", "tree", "tree&(window|sink)", "causal&window"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_parts(parts, mask):
    case = replace(make_case(rng(3), mask=mask, logit_scale=30), parts=PARTS[parts])
    assert_within_budget(*attend(case), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", ["all", "rope gptj", "cap and alibi"])
def test_parts_in_other_dtypes(parts, dtype):
    case = replace(make_case(rng(4), mask="tree", dtype=dtype, logit_scale=30), parts=PARTS[parts])
    assert_within_budget(*attend(case), case)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["tree", "tree&(window|sink)", "tree&window"]),
    st.sampled_from(sorted(set(PARTS) - {"rope dynamic"})),
    st.sampled_from(DTYPES),
    st.sampled_from(["paged", "ragged"]),
    st.integers(0, 2**32 - 1),
)
def test_a_path_replayed_linearly_is_the_same(mask, parts, dtype, storage, seed):
    """Verify equals decode, bit for bit, whatever the parts. Parents come first, as in decoding."""
    random = rng(seed)
    trees = [parents_first(random_forest(random, int(size))) for size in random.integers(1, 30, 2)]
    contexts = random.integers(0, 90, 2).tolist()
    case = make_case(random, mask=mask, dtype=dtype, storage=storage, trees=trees, contexts=contexts, logit_scale=30)
    case = replace(case, parts=PARTS[parts])
    verified = attend(case)
    for seq, tree in enumerate(case.mask.trees):
        first = tree.num_nodes - int(np.diff(case.q_indptr)[seq])
        for node in random.permutation(np.arange(first, tree.num_nodes))[:2].tolist():
            path, rows = gather_path(case, seq, node, random, only_last=True)
            assert_same(attend(path), tuple(part[rows] for part in verified))


def latent(random, mask, dtype="float32", d_latent=32, d_rope=8, q_heads=16, page_size=5):
    """A batch over compressed keys and values: the same lengths and masks as a paged case."""
    sizes = {"q_heads": q_heads, "kv_heads": 1, "d_qk": d_latent + d_rope, "d_v": d_latent}
    case = make_case(random, mask=mask, dtype=dtype, storage="ragged", **sizes)
    lengths = np.asarray(case.kv.kv_len)
    counts = -(-lengths // page_size)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    pool = np.full((indptr[-1] + 2, page_size, d_latent + d_rope), np.nan, np.float32)
    ids = random.permutation(len(pool))[: indptr[-1]]
    for seq, length in enumerate(lengths):
        for page, begin in zip(ids[indptr[seq] : indptr[seq + 1]], range(0, length, page_size), strict=True):
            used = min(page_size, length - begin)
            pool[page, :used] = random.standard_normal((used, d_latent + d_rope)) * 2
    last = np.where(lengths > 0, (lengths - 1) % page_size + 1, 0)
    kv = ta.LatentKV(pool.astype(numpy_dtype(dtype)), indptr, ids, last, d_latent=d_latent)
    return replace(case, kv=kv, sm_scale=0.2)


@pytest.mark.parametrize("mask", ["tree", "causal", "full", "tree&(window|sink)"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_storage(mask, dtype):
    case = latent(rng(5), mask, dtype)
    assert_within_budget(*attend(case), case)


@pytest.mark.parametrize("q_heads", [1, 4, 8, 128])
def test_latent_storage_with_any_number_of_heads(q_heads):
    case = latent(rng(6), "tree", q_heads=q_heads)
    assert_within_budget(*attend(case), case)


def test_latent_storage_of_a_real_model():
    case = latent(rng(7), "tree", "float16", d_latent=512, d_rope=64, q_heads=128, page_size=16)
    assert_within_budget(*attend(replace(case, sm_scale=192**-0.5)), replace(case, sm_scale=192**-0.5))


@pytest.mark.parametrize("parts", [{}, {"rope": ta.Rope()}, {"alibi": SLOPES}], ids=["plain", "rope", "alibi"])
def test_a_window_moves_past_dropped_pages(parts):
    """Dropping what no window sees changes nothing: positions, not slots, decide."""
    random, page, window, sink = rng(8), 4, 9, 3
    tree = ta.TokenTree.from_parents([-1, 0, 0, 1, 2, 2])
    length = 60 + tree.num_nodes
    pages = random.standard_normal((17, 2, 2, page, 16)).astype(np.float32)
    ids, last = random.permutation(17), [(length - 1) % page + 1]
    q = random.standard_normal((tree.num_nodes, 4, 16)).astype(np.float32)
    mask = ta.Tree([tree]) & (ta.Window(window) | ta.Sink(sink))
    whole = ta.attention(q, ta.PagedKV(pages, [0, 17], ids, last), mask, **parts)
    gone = (60 - window) // page - 1  # whole pages behind the first, before the window
    fewer = np.concatenate([ids[:1], ids[1 + gone :]])
    kv = ta.PagedKV(pages, [0, len(fewer)], fewer, last, kept=[page], dropped=[gone * page])
    assert_same(ta.attention(q, kv, mask, **parts), whole)
    case = replace(make_case(rng(), mask="tree"), q=q, kv=kv, mask=mask, q_indptr=np.int32([0, 6]), parts=parts)
    assert_within_budget(*ta.attention(q, kv, mask, **parts), case)


@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_rotation_is_right_up_to_a_million(style):
    """One key far away, scores of its own: the rotation inside the kernel against float64."""
    random, d = rng(9), 64
    positions = [1, 1023, 1024, 65_537, 524_287, 999_999]
    rope = ta.Rope(5e5, style=style)
    for position in positions:
        pages = random.standard_normal((1, 2, 1, 2, d)).astype(np.float32)
        kv = ta.PagedKV(pages, [0, 1], [0], [2], kept=[1], dropped=[position - 1])
        q = random.standard_normal((1, 1, d)).astype(np.float32)
        case = replace(
            make_case(rng(), mask="causal"),
            q=q,
            kv=kv,
            mask=ta.Causal(),
            q_indptr=np.int32([0, 1]),
            parts={"rope": rope},
        )
        got, want = ta.attention(q, kv, ta.Causal(), rope=rope), case.expected
        assert np.abs(got[1] - want[1]).max() < 2e-5
        assert np.abs(got[0] - want[0]).max() < 2e-5


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"softcap": 0.0}, ta.ShapeError, "softcap: expected a number from"),
        ({"softcap": "x"}, ta.DTypeError, "softcap: expected a number"),
        ({"alibi": SLOPES[:3]}, ta.ShapeError, r"alibi: expected shape \[q_heads\] = \[4\]"),
        ({"alibi": [np.nan] * 4}, ta.ShapeError, "alibi: expected numbers within"),
        ({"sink_logits": [np.inf] * 4}, ta.ShapeError, "sink_logits: expected numbers within"),
        ({"sink_logits": ["a"] * 4}, ta.DTypeError, "sink_logits: expected numbers"),
        ({"rope": 1e4}, ta.DTypeError, "rope: expected a Rope"),
        ({"rope": ta.Rope(rotary_dim=64)}, ta.ShapeError, "rotary_dim"),
    ],
)
def test_bad_parts_are_refused(parts, error, message):
    case = replace(make_case(rng()), parts=parts)
    with pytest.raises(error, match=message):
        attend(case)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"kept": [-1], "dropped": [4]}, ta.IndexRangeError, "kept: expected 0 or more"),
        ({"kept": [99], "dropped": [4]}, ta.IndexRangeError, "kept: expected 0 or more"),
        ({"kept": [1], "dropped": [-4]}, ta.IndexRangeError, "dropped: expected 0 or more"),
        ({"kept": [1], "dropped": [2**31 - 1]}, ta.IndexRangeError, "dropped: expected 0 or more"),
        ({"dropped": [1, 2]}, ta.ShapeError, "dropped: expected shape"),
    ],
)
def test_bad_moves_are_refused(fields, error, message):
    kv = ta.PagedKV(np.zeros((1, 2, 1, 4, 8), np.float32), [0, 1], [0], [3], **fields)
    with pytest.raises(error, match=message):
        ta.attention(np.zeros((1, 1, 8), np.float32), kv, ta.Causal())


def test_latent_refusals():
    pages = np.zeros((2, 4, 40), np.float32)
    for d_latent, error in ((0, ta.IndexRangeError), (41, ta.IndexRangeError), ("x", ta.DTypeError)):
        with pytest.raises(error, match=r"d_latent: expected (1 to 40|an integer)"):
            _ = ta.LatentKV(pages, [0, 1], [0], [3], d_latent=d_latent).pools
    with pytest.raises(ta.ShapeError, match=r"pages: expected \[num_pages, page_size, d_latent \+ d_rope\]"):
        _ = ta.LatentKV(pages[0], [0, 1], [0], [3], d_latent=8).pools


@pytest.mark.parametrize(
    "part",
    [{"softcap": 1e39}, {"softcap": 3e38}, {"softcap": 1e-39}, {"sm_scale": 3e38}, {"sm_scale": -3e38},
     {"alibi": [1e300, 0]}, {"alibi": [-3e38, 0]}, {"sink_logits": [3e38, 0]}, {"sink_logits": [-3e38, 0]}],
    ids=str,
)  # fmt: skip
def test_a_factor_that_float32_cannot_multiply_is_refused(part):
    """Times log2(e) it would be infinite, and zero times that NaN."""
    q = np.zeros((3, 2, 16), np.float32)
    kv = ta.RaggedKV(np.ones((5, 1, 16), np.float32), np.ones((5, 1, 16), np.float32), [0, 5])
    with pytest.raises(ta.ShapeError, match=f"{next(iter(part))}: expected"):
        ta.attention(q, kv, ta.Causal(), **part)


@pytest.mark.parametrize("part", [{"softcap": 1.6e38}, {"softcap": 1.2e-38}, {"sm_scale": 1.6e38}], ids=str)
def test_the_largest_factors_give_numbers(part):
    q = np.zeros((3, 2, 16), np.float32)
    kv = ta.RaggedKV(np.ones((5, 1, 16), np.float32), np.ones((5, 1, 16), np.float32), [0, 5])
    out, lse = ta.attention(q, kv, ta.Full(), **part)
    assert (out == 1).all()
    np.testing.assert_allclose(lse, np.log2(5), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_latent_values_are_not_rotated(rows):
    """Keys turn as they are read, the values in the same slots do not."""
    pages = rng(8).standard_normal((4, 16, 24), np.float32)
    kv = ta.LatentKV(pages, [0, 4], [2, 0, 1, 3], [5], d_latent=16)
    q = rng(9).standard_normal((rows, 1, 24), np.float32)
    case = Case(q, kv, ta.Causal(), np.array([0, rows], np.int32), parts={"rope": ta.Rope(rotary_dim=8)})
    assert_within_budget(*attend(case), case)
