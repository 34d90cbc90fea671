"""Attention is the reference's, for every mask, storage, dtype, head shape and memory layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product

import ml_dtypes
import numpy as np
import pytest
from helpers import DTYPES, attend, plan_of, rng

import treeattn as ta
from treeattn.arrays import numpy_dtype
from treeattn.testing import assert_within_budget, make_case, mask_kinds

PAIRS = list(product(DTYPES, DTYPES))
LONG = [(1, 300), (130, 333), (0, 9), (33, 33), (2, 0)]  # several blocks and row tiles
LONG_TREES = [(1, 300), (130, 333), (0, 9), (33, 33), (4, 180)]


def check(case, **options):
    assert_within_budget(*attend(case, **options), case)


# masks, storages, dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["paged", "ragged"])
@pytest.mark.parametrize("mask", mask_kinds())
def test_masks(mask, storage):
    for seed in range(4):
        check(make_case(rng(seed), mask=mask, storage=storage))


@pytest.mark.parametrize("storage", ["paged", "ragged"])
@pytest.mark.parametrize("mask", mask_kinds())
def test_masks_on_long_sequences(mask, storage):
    lengths = LONG_TREES if "tree" in mask else LONG
    check(make_case(rng(1), mask=mask, storage=storage, lengths=lengths, q_heads=3, kv_heads=1, page_size=17))


@pytest.mark.parametrize(
    ("mask", "pair"), [(mask, PAIRS[1 + index % 8]) for index, mask in enumerate(list(mask_kinds())[::2])]
)
def test_masks_in_other_dtypes(mask, pair):
    for storage in ("paged", "ragged"):
        check(make_case(rng(2), mask=mask, storage=storage, dtype=pair[0], kv_dtype=pair[1]))


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_dtypes(dtype, kv_dtype):
    for seed, storage in product(range(3), ("paged", "ragged")):
        check(make_case(rng(seed), mask="tree", storage=storage, dtype=dtype, kv_dtype=kv_dtype))
    lengths = [(1, 90), (2, 90), (3, 90), (6, 90), (8, 90), (40, 90)]
    check(make_case(rng(3), lengths=lengths, dtype=dtype, kv_dtype=kv_dtype, q_heads=1, kv_heads=1))


# head shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 71])
def test_groups(group):
    for kv_heads in (1, 3):
        check(make_case(rng(group), mask="tree", q_heads=group * kv_heads, kv_heads=kv_heads))


@pytest.mark.parametrize("rows", [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 65, 127, 128, 129, 257])
def test_numbers_of_rows(rows):
    """Each class of row tile, one row below and one above its edges."""
    lengths = [(rows, rows + context) for context in (0, 1, 31, 70)]
    check(make_case(rng(rows), mask="tree", lengths=lengths, q_heads=1, kv_heads=1))


HEAD_DIMS = [1, 8, 46, 56, 80, 96, 100, 112, 192, 256, 512, 576]


@pytest.mark.parametrize(
    ("d", "dtype", "kv_dtype"),
    [
        (d, *pair)
        for index, d in enumerate(HEAD_DIMS)
        for pair in (("float32", "float32"), PAIRS[1 + index % 8])
        if pair == PAIRS[0] or d in (1, 46, 80, 96, 192)  # each is a kernel to compile
    ],
)
def test_head_dims(d, dtype, kv_dtype):
    lengths = [(1, 40), (2, 35), (9, 60), (0, 3), (7, 7)]
    for storage in ("paged", "ragged"):
        check(make_case(rng(d), storage=storage, lengths=lengths, d_qk=d, dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize(("d_qk", "d_v"), [(192, 128), (8, 46), (46, 1), (1, 100), (3, 5)])
def test_values_of_another_size(d_qk, d_v):
    lengths = [(1, 40), (2, 35), (9, 60), (0, 3), (7, 7)]
    case = make_case(rng(d_v), lengths=lengths, d_qk=d_qk, d_v=d_v, storage="ragged")
    assert attend(case)[0].shape == (19, 4, d_v)
    check(case)


# lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 17, 64, 256])
@pytest.mark.parametrize("mask", ["tree", "causal&(window|sink)"])
def test_page_sizes(page_size, mask):
    lengths = [(5, 256 + edge) for edge in (-1, 0, 1)] + [(1, 16), (17, 17), (0, 0), (3, 64)]
    check(make_case(rng(page_size), mask=mask, lengths=lengths, page_size=page_size))


@pytest.mark.parametrize("storage", ["paged", "ragged"])
@pytest.mark.parametrize(
    "lengths", [[(0, 0)], [(0, 0)] * 3, [(0, 40), (0, 7)], [(3, 0), (1, 0)], [(0, 0), (1, 1), (0, 5)], []]
)
def test_batches_with_nothing_in_them(lengths, storage):
    case = make_case(rng(), mask="causal", lengths=lengths, storage=storage)
    check(case)
    assert attend(case)[0].shape == case.q.shape


def test_no_rows_of_a_tree():
    for lengths in ([(0, 0)], [(0, 30), (0, 4)]):
        check(make_case(rng(), mask="tree", lengths=lengths))


@pytest.mark.parametrize("mask", ["full", "causal", "tree"])
@pytest.mark.parametrize("rows", [1, 4, 8, 20])
def test_every_context_length(mask, rows):
    lengths = [(rows, rows + context) for context in chain(range(70), range(90, 110))]
    check(make_case(rng(rows), mask=mask, lengths=lengths, q_heads=1, kv_heads=1, page_size=3))


def test_first_columns_masked():
    lengths = [(6, 60), (12, 100), (1, 70)]
    mask = ta.Causal() & ta.PaddedLeft([4, 9, 1])
    case = make_case(rng(), mask=mask, lengths=lengths)
    assert np.isneginf(case.expected[1]).any()
    check(case)


# values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logit_scale", [1e-3, 20.0, 200.0, 2000.0])
@pytest.mark.parametrize("sm_scale", [None, 0.01, 3.0, -1.0])
def test_scales(logit_scale, sm_scale):
    check(make_case(rng(), mask="tree", logit_scale=logit_scale, sm_scale=sm_scale))


def test_a_scale_of_zero_is_the_mean():
    case = make_case(rng(), mask="tree", logit_scale=1.0)
    flat = replace(case, sm_scale=0.0)
    check(flat)
    seen = np.exp2(attend(flat)[1].astype(np.float64))
    np.testing.assert_allclose(seen, np.round(seen), rtol=1e-6)


def test_lse_is_base_two():
    k = np.zeros((8, 1, 16), np.float32)
    _, lse = ta.attention(np.ones((1, 1, 16), np.float32), ta.RaggedKV(k, k, [0, 8]), ta.Full())
    assert lse.tolist() == [[3.0]]
    assert ta.to_natural(lse).item() == pytest.approx(np.log(8))


def test_visible_nan_and_infinity_arrive():
    case = make_case(rng(), mask="full", lengths=[(20, 40), (1, 40)], storage="ragged", logit_scale=1.0)
    case.kv.v[3, 0, 5], case.kv.v[7, 1, 2], case.kv.k[50, 0, 1] = np.nan, np.inf, np.nan
    out, lse = attend(case)
    want_out, want_lse = case.expected
    assert np.array_equal(np.isnan(out), np.isnan(want_out))
    assert np.array_equal(np.isinf(out), np.isinf(want_out))
    assert np.array_equal(np.isnan(lse), np.isnan(want_lse))


# memory layouts ---------------------------------------------------------------------------------------------


def spread(array, axis=0):
    """The same numbers, not adjacent along ``axis``, between NaN."""
    wide = np.full([size * (3 if at == axis else 1) for at, size in enumerate(array.shape)], np.nan, array.dtype)
    view = wide[tuple(slice(1, None, 3) if at == axis else slice(None) for at in range(array.ndim))]
    view[...] = array
    return view


def unaligned(array, offset):
    raw = np.empty(array.nbytes + offset, np.uint8)
    view = np.ndarray(array.shape, array.dtype, raw.data, offset)
    view[...] = array
    return view


def reversed_memory(array):
    return np.ascontiguousarray(array[::-1])[::-1]


def locked(array):
    array = array.copy()
    array.setflags(write=False)
    return array


LAYOUTS = {
    "spread rows": lambda array: spread(array, 0),
    "spread heads": lambda array: spread(array, 1),
    "spread last axis": lambda array: spread(array, array.ndim - 1),
    "reversed": reversed_memory,
    "fortran": np.asfortranarray,
    "4 bytes off a cache line": lambda array: unaligned(array, 4),
    "1 byte off": lambda array: unaligned(array, 1),
    "read-only": locked,
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
}


@pytest.mark.parametrize("storage", ["paged", "ragged"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, storage):
    """However q, k, v and pages lie, results are those of contiguous copies."""
    change = LAYOUTS[layout]
    case = make_case(rng(5), mask="tree", storage=storage)
    names = ("pages",) if storage == "paged" else ("k", "v")
    kv = replace(case.kv, **{name: change(getattr(case.kv, name)) for name in names})
    want = attend(case)
    for q, keys in ((change(case.q), kv), (case.q, kv), (change(case.q), case.kv)):
        got = ta.attention(q, keys, case.mask, q_indptr=case.q_indptr)
        assert all(map(np.array_equal, got, want))


def test_nhd_pool():
    """[num_pages, 2, page_size, kv_heads, d], seen through a transposed view."""
    case = make_case(rng(), mask="tree")
    nhd = np.ascontiguousarray(case.kv.pages.transpose(0, 1, 3, 2, 4))
    kv = replace(case.kv, pages=nhd.transpose(0, 1, 3, 2, 4))
    assert kv.pools.k.owner.base is nhd, "copied"
    assert np.array_equal(attend(replace(case, kv=kv))[0], attend(case)[0])


@pytest.mark.parametrize("axis", [0, 1])
def test_layer_of_a_pool_of_layers(axis):
    """[layers, num_pages, ...] or [num_pages, layers, ...]: a layer is a slice, not a copy."""
    case = make_case(rng(), mask="tree")
    layers = np.stack([np.full_like(case.kv.pages, np.nan), case.kv.pages, case.kv.pages * 0], axis=axis)
    kv = replace(case.kv, pages=np.moveaxis(layers, axis, 0)[1])
    assert np.shares_memory(kv.pools.k.owner, layers)
    assert np.array_equal(attend(replace(case, kv=kv))[0], attend(case)[0])


def test_packed_projections():
    """q, k and v as slices of the output of one projection."""
    case = make_case(rng(), mask="causal", lengths=[(7, 7), (0, 0), (30, 30)], storage="ragged")
    packed = np.concatenate([case.q, case.kv.k, case.kv.v], axis=1)
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    kv = ta.RaggedKV(k, v, case.kv.kv_indptr)
    got = ta.attention(q, kv, case.mask, q_indptr=case.q_indptr)
    assert all(map(np.array_equal, got, attend(case)))


@pytest.mark.parametrize("kind", [list, tuple, np.int64, np.uint8, np.int32])
def test_integers_of_any_width(kind):
    case = make_case(rng(), mask="tree")
    names = ("page_indptr", "page_ids", "last_page_len")
    arrays = [getattr(case.kv, name) for name in names]
    changed = [kind(array.tolist()) if isinstance(kind(), list | tuple) else array.astype(kind) for array in arrays]
    kv = replace(case.kv, **dict(zip(names, changed, strict=True)))
    got = ta.attention(case.q, kv, case.mask, q_indptr=case.q_indptr.tolist())
    assert all(map(np.array_equal, got, attend(case)))


def test_inputs_are_unchanged():
    for storage in ("paged", "ragged"):
        case = make_case(rng(), mask="tree&(window|sink)", storage=storage, dtype="float16")
        arrays = [case.q, case.q_indptr, *(value for value in vars(case.kv).values() if value is not None)]
        before = [array.tobytes() for array in arrays]
        attend(case)
        assert [array.tobytes() for array in arrays] == before


# what comes back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_written_and_returned(dtype):
    case = make_case(rng(), mask="tree", dtype=dtype)
    want = attend(case)
    for out in (np.empty_like(case.q), spread(np.zeros_like(case.q)), reversed_memory(np.zeros_like(case.q))):
        got, lse = attend(case, out=out)
        assert got is out
        assert np.array_equal(out, want[0])
        assert np.array_equal(lse, want[1])


def test_numpy_kinds():
    for dtype in DTYPES:
        case = make_case(rng(), mask="tree", dtype=dtype)
        out, lse = attend(case)
        assert type(out) is np.ndarray
        assert (out.dtype, lse.dtype) == (numpy_dtype(dtype), np.float32)


def to_torch(array, torch):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize("storage", ["paged", "ragged"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [*zip(DTYPES, DTYPES, strict=True), ("bfloat16", "float16")])
def test_torch(dtype, kv_dtype, storage):
    torch = pytest.importorskip("torch")
    case = make_case(rng(), mask="tree", dtype=dtype, kv_dtype=kv_dtype, storage=storage)
    arrays = {name: to_torch(array, torch) for name, array in vars(case.kv).items() if isinstance(array, np.ndarray)}
    q, kv = to_torch(case.q, torch), replace(case.kv, **arrays)
    out, lse = ta.attention(q, kv, case.mask, q_indptr=torch.from_numpy(case.q_indptr))
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert (out.dtype, lse.dtype) == (getattr(torch, dtype), torch.float32)
    want = attend(case)
    assert np.array_equal(out.float().numpy(), want[0].astype(np.float32))
    assert np.array_equal(lse.numpy(), want[1])
    strided = torch.stack([q, q], dim=-1)[..., 0]
    given = torch.full_like(q, 9)
    assert ta.attention(strided, kv, case.mask, q_indptr=case.q_indptr, out=given)[0] is given
    assert torch.equal(given, out)


def test_torch_tensor_that_needs_gradients():
    torch = pytest.importorskip("torch")
    case = make_case(rng(), mask="tree")
    q = to_torch(case.q, torch).requires_grad_()
    out, _ = ta.attention(q, case.kv, case.mask, q_indptr=case.q_indptr)
    assert np.array_equal(out.detach().numpy(), attend(case)[0])


def test_other_libraries_by_dlpack():
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **kwargs):
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    case = make_case(rng(), mask="tree")
    kv = replace(case.kv, pages=Foreign(case.kv.pages), page_ids=Foreign(case.kv.page_ids))
    got = ta.attention(Foreign(case.q), kv, case.mask, q_indptr=case.q_indptr)
    assert all(map(np.array_equal, got, attend(case)))


def test_q_indptr_may_be_left_out():
    one = make_case(rng(), mask="causal", lengths=[(5, 30)])
    many = make_case(rng(), mask="causal", lengths=[(1, 9), (1, 30), (1, 1)])
    for case in (one, many):
        got = ta.attention(case.q, case.kv, case.mask)
        assert all(map(np.array_equal, got, attend(case)))
    with pytest.raises(ta.ShapeError, match=r"^q_indptr: "):
        ta.attention(make_case(rng()).q, many.kv, ta.Causal())


def test_unchecked_calls_give_the_same():
    case = make_case(rng(), mask="tree&(window|sink)")
    assert all(map(np.array_equal, attend(case, check=False), attend(case)))
    plan = plan_of(case, check=False)
    assert all(map(np.array_equal, plan.run(case.q, check=False), attend(case)))
