"""Storages: lengths, strides, and every error with its message."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from treeattn import reference
from treeattn.arrays import View, numpy_dtype
from treeattn.errors import DTypeError, IndexRangeError, ShapeError
from treeattn.storage import ENDLESS_PAGE, LatentKV, PagedKV, Pools, RaggedKV, Storage

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def ragged(k: object = None, v: object = None, kv_indptr: object = (0, 2, 2, 5)) -> RaggedKV:
    k = np.zeros((5, 2, 4), np.float32) if k is None else k
    return RaggedKV(k, np.zeros((5, 2, 3), np.float32) if v is None else v, kv_indptr)


def paged(
    pages: object = None,
    page_indptr: object = (0, 2, 2, 3),
    page_ids: object = (5, 1, 0),
    last_page_len: object = (3, 0, 4),
) -> PagedKV:
    pages = np.zeros((6, 2, 2, 4, 8), np.float32) if pages is None else pages
    return PagedKV(pages, page_indptr, page_ids, last_page_len)


def as_read(pools: Pools, which: str) -> np.ndarray:
    """``[num_pages, page_size, kv_heads, d]`` as a kernel reads it: by pointer and strides alone."""
    view: View = getattr(pools, which)
    kind = numpy_dtype(view.dtype)
    slots = view.shape[2] if view.ndim == 4 else 1
    strides = [step * kind.itemsize for step in (*getattr(pools, f"{which}_strides"), 1)]
    memory = SimpleNamespace(
        __array_interface__={
            "version": 3,
            "data": (view.pointer, True),
            "typestr": f"<u{kind.itemsize}",
            "shape": (pools.num_pages, slots, pools.kv_heads, view.shape[-1]),
            "strides": tuple(strides),
        }
    )
    return np.array(memory).view(kind)


def test_ragged_lengths_and_table() -> None:
    kv = ragged()
    kv.validate()
    assert kv.kv_len.dtype == np.int32
    assert kv.kv_len.tolist() == [2, 0, 3]
    assert (kv.num_seqs, kv.kv_heads, kv.dtype) == (3, 2, "float32")
    assert (kv.pools.d_qk, kv.pools.d_v) == (4, 3)
    assert kv.table.page_size == ENDLESS_PAGE


def test_paged_lengths_and_table() -> None:
    kv = paged()
    kv.validate()
    assert kv.kv_len.tolist() == [7, 0, 4]
    assert (kv.num_seqs, kv.kv_heads, kv.dtype) == (3, 2, "float32")
    assert kv.table.page_size == 4
    assert (kv.pools.num_pages, kv.pools.d_qk, kv.pools.d_v) == (6, 8, 8)


@pytest.mark.parametrize("kv", [ragged(np.zeros((0, 1, 1), np.float16), np.zeros((0, 1, 1), np.float16), [0])])
def test_no_sequence(kv: Storage) -> None:
    kv.validate()
    assert kv.num_seqs == 0
    empty = paged(np.zeros((0, 2, 1, 1, 1), np.float16), [0], [], [])
    empty.validate()
    assert empty.kv_len.tolist() == []


@pytest.mark.parametrize("integer", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_integers_of_any_width(integer: type) -> None:
    parts = [np.array(part, integer) for part in ((0, 2, 2, 3), (5, 1, 0), (3, 0, 4))]
    kv = paged(None, *parts)
    kv.validate()
    assert kv.kv_len.tolist() == [7, 0, 4]
    assert kv.table.page_ids.dtype == np.int32


def test_the_last_page_may_have_any_length() -> None:
    for last in range(1, 5):
        kv = paged(last_page_len=(last, 0, 4))
        kv.validate()
        assert kv.kv_len.tolist() == [4 + last, 0, 4]


@pytest.mark.parametrize(
    ("kv", "error", "text"),
    [
        (
            paged(page_ids=(5, 6, 0)),
            IndexRangeError,
            "page_ids: expected int32 in [0, 6), got 6 at index 1 (sequence 0); the pool has 6 pages",
        ),
        (
            paged(page_ids=(5, 1, -1)),
            IndexRangeError,
            "page_ids: expected int32 in [0, 6), got -1 at index 2 (sequence 2); the pool has 6 pages",
        ),
        (
            paged(page_ids=(5, 1)),
            IndexRangeError,
            "page_indptr: expected to end at 2 (= the length of page_ids), got 3 at index 3",
        ),
        (
            paged(page_ids=(5, 1, 2**31)),
            IndexRangeError,
            "page_ids: expected values that int32 holds, got 2147483648 at index 2",
        ),
        (paged(page_ids=((5, 1, 0),)), ShapeError, "page_ids: expected one dimension, got shape (1, 3)"),
        (paged(page_ids=(5.0, 1.0, 0.0)), DTypeError, "page_ids: expected integers, got dtype float64"),
        (
            paged(page_indptr=(1, 2, 2, 3)),
            IndexRangeError,
            "page_indptr: expected [num_seqs + 1] integers with 0 at index 0, got 1",
        ),
        (
            paged(page_indptr=(0, 2, 1, 3)),
            IndexRangeError,
            "page_indptr: expected values that never fall, got 1 after 2 at index 2",
        ),
        (
            paged(page_indptr=(0, 1, 1, 2)),
            IndexRangeError,
            "page_indptr: expected to end at 3 (= the length of page_ids), got 2 at index 3",
        ),
        (
            paged(page_indptr=()),
            IndexRangeError,
            "page_indptr: expected [num_seqs + 1] integers with 0 at index 0, got an empty",
        ),
        (
            paged(last_page_len=(3, 0)),
            ShapeError,
            "last_page_len: expected shape [3], got [2]; it needs one entry per sequence",
        ),
        (
            paged(last_page_len=(5, 0, 4)),
            IndexRangeError,
            "last_page_len: expected 1 to 4 (= page_size), got 5 at index 0",
        ),
        (
            paged(last_page_len=(3, 0, 0)),
            IndexRangeError,
            "last_page_len: expected 1 to 4 (= page_size), got 0 at index 2",
        ),
        (
            paged(last_page_len=(-1, 0, 4)),
            IndexRangeError,
            "last_page_len: expected 1 to 4 (= page_size), got -1 at index 0",
        ),
        (
            paged(last_page_len=(3, 1, 4)),
            IndexRangeError,
            "last_page_len: expected 0 (the sequence has no pages), got 1 at index 1",
        ),
        (
            paged(np.zeros((6, 2, 2, 4, 8))),
            DTypeError,
            "pages: float64 is not offered, since every kernel accumulates in float32",
        ),
        (
            paged(np.zeros((6, 2, 2, 4, 8), np.int8)),
            DTypeError,
            "pages: expected dtype float32, float16 or bfloat16, got int8",
        ),
        (
            paged(np.zeros((6, 2, 4, 8), np.float32)),
            ShapeError,
            "pages: expected [num_pages, 2, kv_heads, page_size, d], got shape (6, 2, 4, 8)",
        ),
        (
            paged(np.zeros((6, 3, 2, 4, 8), np.float32)),
            ShapeError,
            "keys and values are indices 0 and 1 of the second axis",
        ),
        (
            paged(np.zeros((6, 2, 2, 0, 8), np.float32)),
            ShapeError,
            "pages: expected [num_pages, 2, kv_heads, page_size, d]",
        ),
        (paged(np.zeros((6, 2, 0, 4, 8), np.float32)), ShapeError, "k, v: expected at least one kv head and d >= 1"),
        (paged(np.zeros((6, 2, 2, 4, 0), np.float32)), ShapeError, "k, v: expected at least one kv head and d >= 1"),
        (paged([[1.0]]), DTypeError, "pages: expected an array (NumPy, or anything with __dlpack__), got list"),
        (
            ragged(kv_indptr=(1, 2, 2, 5)),
            IndexRangeError,
            "kv_indptr: expected [num_seqs + 1] integers with 0 at index 0, got 1",
        ),
        (
            ragged(kv_indptr=(0, 2, 1, 5)),
            IndexRangeError,
            "kv_indptr: expected values that never fall, got 1 after 2 at index 2",
        ),
        (
            ragged(kv_indptr=(0, 2, 2, 6)),
            IndexRangeError,
            "kv_indptr: expected to end at 5 (= the length of k), got 6 at index 3",
        ),
        (
            ragged(kv_indptr=()),
            IndexRangeError,
            "kv_indptr: expected [num_seqs + 1] integers with 0 at index 0, got an empty array",
        ),
        (ragged(kv_indptr=(0, None)), DTypeError, "kv_indptr: expected integers, got dtype object"),
        (ragged(np.zeros((5, 2, 4))), DTypeError, "k: float64 is not offered"),
        (ragged(v=np.zeros((5, 2, 4))), DTypeError, "v: float64 is not offered"),
        (ragged(v=np.zeros((5, 2, 4), np.float16)), DTypeError, "v: expected dtype float32 as k has, got float16"),
        (ragged(np.zeros((5, 2), np.float32)), ShapeError, "k: expected [kv_total, kv_heads, d], got shape (5, 2)"),
        (ragged(v=np.zeros(5, np.float32)), ShapeError, "v: expected [kv_total, kv_heads, d], got shape (5,)"),
        (ragged(v=np.zeros((5, 1, 4), np.float32)), ShapeError, "v: expected [5, 2, d_v] as k has, got (5, 1, 4)"),
        (ragged(np.zeros((5, 2, 0), np.float32)), ShapeError, "k, v: expected at least one kv head and d >= 1"),
    ],
)
def test_validation_says_what_is_wrong(kv: Storage, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        kv.validate()
    assert text in str(caught.value)


def test_a_table_without_indptr_says_so() -> None:
    with pytest.raises(
        IndexRangeError, match=r"kv_indptr: expected \[num_seqs \+ 1\] integers with 0 at index 0, got an empty"
    ):
        _ = ragged(kv_indptr=()).table


def test_a_sequence_longer_than_int32_is_refused() -> None:
    pages = np.broadcast_to(np.zeros((), np.float32), (1, 2, 1, 2**20, 1))
    kv = PagedKV(pages, [0, 4096], np.zeros(4096, np.int32), [1])
    with pytest.raises(IndexRangeError, match="page_indptr: a sequence of 4293918721 keys; at most 2147483647"):
        kv.validate()


def filled(shape: tuple[int, ...], kind: type) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(kind)


@pytest.mark.parametrize("kind", DTYPES)
def test_nhd_pool_needs_no_copy(kind: type) -> None:
    nhd = filled((6, 2, 4, 3, 8), kind)
    kv = paged(nhd.transpose(0, 1, 3, 2, 4))
    kv.validate()
    pools = kv.pools
    assert (pools.k.pointer, pools.v.pointer) == (nhd.ctypes.data, nhd[:, 1:].ctypes.data)
    assert np.array_equal(as_read(pools, "k"), nhd[:, 0])
    assert np.array_equal(as_read(pools, "v"), nhd[:, 1])


@pytest.mark.parametrize("kind", DTYPES)
def test_pool_is_read_as_it_lies(kind: type) -> None:
    pages = filled((12, 2, 3, 4, 8), kind)
    for lie in (pages[:6], pages[::2], pages[::-2], pages[:6, :, ::-1], pages[:6, ::-1], pages[:6, ..., 2:5]):
        pools = paged(lie).pools
        assert pools.k.owner is lie
        assert np.array_equal(as_read(pools, "k"), lie[:, 0].transpose(0, 2, 1, 3))
        assert np.array_equal(as_read(pools, "v"), lie[:, 1].transpose(0, 2, 1, 3))


def unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    copy = np.ndarray(array.shape, array.dtype, memory, 1)
    copy[...] = array
    assert not copy.flags.aligned
    return copy


@pytest.mark.parametrize(
    "make", [unaligned, lambda a: a.astype(a.dtype.newbyteorder()), lambda a: np.repeat(a, 2, -1)[..., ::2]]
)
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_what_cannot_be_read_as_it_lies_is_copied(make: object, kind: type) -> None:
    pages, k = filled((6, 2, 2, 4, 8), kind), filled((5, 2, 4), kind)
    kv = paged(make(pages))
    kv.validate()
    assert np.array_equal(as_read(kv.pools, "v"), pages[:, 1].transpose(0, 2, 1, 3))
    pools = ragged(make(k), make(k)).pools
    assert np.array_equal(as_read(pools, "k")[:, 0], k)
    assert pools.dtype == np.dtype(kind).name


def test_read_only_arrays_are_accepted_without_a_copy() -> None:
    pages, k = filled((6, 2, 2, 4, 8), np.float32), filled((5, 2, 4), np.float32)
    pages.flags.writeable = k.flags.writeable = False
    kv = paged(pages)
    kv.validate()
    assert kv.pools.k.pointer == pages.ctypes.data
    assert ragged(k, k).pools.v.pointer == k.ctypes.data


def test_ragged_strides() -> None:
    qkv = filled((5, 6, 4), np.float16)
    kv = ragged(qkv[:, 2:4], qkv[:, 4:6])
    assert kv.pools.k_strides == kv.pools.v_strides == (24, 24, 4)
    assert np.array_equal(as_read(kv.pools, "k")[:, 0], qkv[:, 2:4])
    heads_first = filled((2, 5, 4), np.float32).transpose(1, 0, 2)
    pools = ragged(heads_first, heads_first).pools
    assert pools.k.owner is heads_first
    assert np.array_equal(as_read(pools, "v")[:, 0], heads_first)


def test_pytorch_bfloat16_pool_is_not_copied() -> None:
    torch = pytest.importorskip("torch")
    pages = torch.randn(6, 2, 4, 2, 8).to(torch.bfloat16)
    kv = paged(pages.transpose(2, 3))
    kv.validate()
    assert (kv.dtype, kv.pools.k.pointer) == ("bfloat16", pages.data_ptr())
    assert np.array_equal(reference.gather(kv, 2)[0], pages[0, 0].double().numpy())


def test_table_and_oracle_find_the_same_keys() -> None:
    pages = filled((6, 2, 2, 4, 8), np.float32)
    kv = paged(pages)
    table, k = kv.table, as_read(kv.pools, "k")
    for seq in range(kv.num_seqs):
        at = np.arange(table.kv_len[seq])
        page = table.page_ids[table.page_indptr[seq] + at // table.page_size]
        assert np.array_equal(k[page, at % table.page_size], reference.gather(kv, seq)[0])


def test_latent_width_may_be_a_numpy_integer():
    kv = LatentKV(np.zeros((2, 4, 8), np.float32), [0, 1], [0], [2], d_latent=np.int64(4))
    assert kv.pools.d_v == 4


def test_kept_without_dropped_is_refused():
    kv = PagedKV(np.zeros((2, 2, 1, 4, 8), np.float32), [0, 1], [0], [2], kept=[1])
    with pytest.raises(ShapeError, match="kept: expected dropped beside it"):
        kv.validate()


def test_repr_shows_shapes_not_elements():
    """A pool has gigabytes, and a traceback may show it; wrong arrays are shown too."""
    pages = np.zeros((4, 2, 1, 8, 16), "float16")
    assert repr(PagedKV(pages, [0, 1], [3], [8])) == "PagedKV(pages=[4, 2, 1, 8, 16], ...)"
    assert repr(RaggedKV(pages[0, 0], "junk", None)) == "RaggedKV(k=[1, 8, 16], v=[], ...)"
