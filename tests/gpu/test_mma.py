"""The tensor-core template against the oracle, on CPU fibers: every bound, barrier and race is checked as it runs."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

import treeattn as ta
from treeattn.device_work import drop_unseen
from treeattn.devices import DeviceArray
from treeattn.masks import Batch
from treeattn.planner import Tiles, even_rows, find_visits
from treeattn.schedules.gpu import GpuTile, choose
from treeattn.schedules.mma import MmaTile
from treeattn.targets import GPUS
from treeattn.testing import assert_within_budget, make_case, mask_kinds
from treeattn.testing.fibers.device import FiberDevice

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA text runs on the CPU by way of g++")

DEVICE = FiberDevice()


def case_of(seed, **options):
    return make_case(np.random.default_rng(seed), **{"dtype": "float16", "d_qk": 64} | options)


def attend(case, device=DEVICE, kv=None):
    return ta.attention(case.q, kv or case.kv, case.mask, **case.options, target=device)


def assert_right(case, device=DEVICE):
    before = device.launches
    assert_within_budget(*attend(case, device), case)
    assert device.launches > before


# every mask, storage and size --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", mask_kinds())
def test_masks(mask):
    for seed, storage in enumerate(("paged", "ragged")):
        assert_right(case_of(seed, mask=mask, storage=storage, q_heads=4, kv_heads=2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [16, 64, 80, 128, 256])
def test_head_sizes(d, dtype):
    case = case_of(d, mask="tree", d_qk=d, dtype=dtype, q_heads=4, kv_heads=1)
    assert_right(case)


def test_values_of_another_size_than_keys():
    assert_right(case_of(0, mask="tree&(window|sink)", storage="ragged", d_qk=192, d_v=128))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (8, 8), (10, 2), (7, 1), (71, 1)])
def test_groups(q_heads, kv_heads):
    assert_right(case_of(q_heads, mask="tree", q_heads=q_heads, kv_heads=kv_heads, num_seqs=5))


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 200])
def test_page_sizes(page_size):
    assert_right(case_of(page_size, mask="tree", page_size=page_size))


@pytest.mark.parametrize("lengths", [((130, 200),), ((1, 300), (64, 64), (17, 129)), ((200, 40),)], ids=str)
def test_rows_and_columns_of_many_blocks(lengths):
    for mask in ("causal", "full"):
        assert_right(case_of(1, mask=mask, lengths=lengths, q_heads=2, kv_heads=1))


def test_the_order_of_threads_and_blocks_changes_nothing():
    case = case_of(3, mask="tree", lengths=((40, 150), (9, 20)), q_heads=4, kv_heads=2)
    results = [attend(case, FiberDevice(seed=1000 * seed)) for seed in range(4)]
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 32, 33])
def test_tiles_of_few_and_many_rows(rows, d):
    """Warps that share rows, each with its own columns, merge their states in the end."""
    lengths = ((rows, 200), (max(rows // 2, 1), 61), (rows, rows))
    for mask in ("tree", "causal"):
        assert_right(case_of(rows, mask=mask, d_qk=d, lengths=lengths, q_heads=1, kv_heads=1))


# keys split between blocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["causal", "tree", "tree&sink"])
def test_split_keys_are_merged(mask):
    many = FiberDevice(blocks=64)
    assert_right(case_of(5, mask=mask, lengths=((1, 900), (3, 400), (0, 7), (5, 5)), q_heads=4, kv_heads=1), many)
    assert (many.launches == 2) == ("sink" not in mask)  # the second merges; a sink leaves nothing to split


def test_rows_that_see_nothing_in_split_tiles():
    case = case_of(6, mask="padded_left", lengths=((4, 700), (2, 300)))
    assert_right(case, FiberDevice(blocks=64))


# logits ------------------------------------------------------------------------------------------------------------

PARTS = {
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": np.float32([0.5, 0.25, 0.1, 0.01])},
    "sinks": {"sink_logits": np.float32([1.0, -3.0, 20.0, 0.0])},
}


@pytest.mark.parametrize("names", [*((name,) for name in PARTS), tuple(PARTS)], ids="+".join)
@pytest.mark.parametrize("blocks", [1, 64])
def test_logit_parts(names, blocks):
    parts = {key: value for name in names for key, value in PARTS[name].items()}
    case = case_of(7, mask="tree", lengths=((6, 300), (3, 40)), q_heads=4, kv_heads=2)
    assert_right(replace(case, parts=parts), FiberDevice(blocks=blocks))


def test_dropped_columns_keep_their_positions():
    case = case_of(8, mask="tree&window", lengths=((6, 60), (3, 40)), page_size=8)
    kv = replace(case.kv, kept=np.array([8, 0]), dropped=np.array([16, 8]))
    assert_right(replace(case, kv=kv))


# NaN and infinities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("mask", "rows"), [("tree", 70), ("causal", 70), ("tree", 15), ("causal", 7)])
def test_values_that_are_no_numbers_reach_only_rows_that_see_them(mask, rows, value, dtype):
    lengths = ((rows, 100), (rows // 2, 31 + rows // 2))
    case = case_of(9, mask=mask, storage="ragged", lengths=lengths, q_heads=2, kv_heads=1, dtype=dtype)
    v = case.kv.v.copy()
    columns = np.random.default_rng(0).choice(np.arange(100 - rows, len(v)), 12, replace=False)
    v[columns, 0, np.arange(12)] = value
    poisoned = replace(case, kv=replace(case.kv, v=v))
    want = poisoned.expected[0]
    assert 0 < np.isfinite(want).mean() < 1
    out, _ = attend(poisoned)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
    clean, _ = attend(case)
    np.testing.assert_array_equal(out[np.isfinite(want)], clean[np.isfinite(want)])


def test_keys_that_are_nan_reach_only_rows_that_see_them():
    case = case_of(10, mask="tree", storage="ragged", lengths=((70, 100),), q_heads=2, kv_heads=1)
    k = case.kv.k.copy()
    k[[95, 97]] = np.nan
    poisoned = replace(case, kv=replace(case.kv, k=k))
    out, _ = attend(poisoned)
    want = poisoned.expected[0]
    assert 0 < np.isfinite(want).mean() < 1
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))


# memory ------------------------------------------------------------------------------------------------------------


def shifted(array, by):
    """The array in device memory, ``by`` elements from an aligned place."""
    flat = DEVICE.upload(np.concatenate([np.zeros(by, array.dtype), array.reshape(-1)]))
    return DeviceArray(DEVICE, flat.buffer, array.shape, array.dtype.name, by)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_arrays_that_lie_unaligned(dtype):
    case = case_of(11, mask="tree", storage="ragged", lengths=((9, 100), (3, 30)), dtype=dtype)
    kv = ta.RaggedKV(shifted(case.kv.k, 3), shifted(case.kv.v, 5), case.kv.kv_indptr)
    out, lse = ta.attention(shifted(case.q, 1), kv, case.mask, **case.options, target=DEVICE)
    assert_within_budget(out.numpy(), lse.numpy(), case)


def test_offsets_past_32_bits():
    """A pool of 2^31 elements and more, of which only a few pages are ever touched."""
    case = case_of(12, mask="tree", lengths=((5, 60), (3, 30)), page_size=16, q_heads=1, kv_heads=1)
    pages = case.kv.pages
    each = int(np.prod(pages.shape[1:]))
    far = 2**31 // each + 7
    pool = np.zeros((far + len(pages)) * each, np.float16)  # the system gives memory to touched pages alone
    pool[far * each :] = pages.reshape(-1)
    on_device = DeviceArray(DEVICE, pool, (far + len(pages), *pages.shape[1:]), "float16")
    kv = replace(case.kv, pages=on_device, page_ids=case.kv.page_ids + far)
    out, lse = ta.attention(DEVICE.upload(case.q), kv, case.mask, **case.options, target=DEVICE)
    assert_within_budget(out.numpy(), lse.numpy(), case)


# which template serves a spec --------------------------------------------------------------------------------------


def spec(**options):
    given = {"d_qk": 128, "d_v": 128, "q_dtype": "float16", "kv_dtype": "float16", "mask": ("tree", 0)}
    return ta.kernels.spec.KernelSpec(**given | options)


def test_tensor_cores_serve_what_they_can():
    tiles = [choose(spec(), GPUS["cuda"], rows) for rows in (1, 16, 17, 32, 33, 1000)]
    assert tiles == [*2 * [MmaTile(1, 4)], *2 * [MmaTile(2, 2)], *2 * [MmaTile()]]
    assert choose(spec(d_qk=256, d_v=256), GPUS["cuda"], 100) == MmaTile(columns=32)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"q_dtype": "float32", "kv_dtype": "float32"}, "float32"),
        ({"q_dtype": "float16", "kv_dtype": "bfloat16"}, "not both one of"),
        ({"d_qk": 46, "d_v": 46}, "multiples of 16"),
        ({"d_qk": 576, "d_v": 512, "shared": True}, "up to 256"),
        ({"rope": ("neox", 128)}, "rotated"),
    ],
)
def test_the_tiled_template_serves_the_rest(options, reason):
    assert any(reason in why for why in MmaTile().legal(spec(**options), GPUS["cuda"]))
    assert isinstance(choose(spec(**options), GPUS["cuda"], 4), GpuTile)


def test_a_plan_says_which_template_runs():
    def template(dtype):
        case = case_of(14, mask="tree", dtype=dtype, lengths=((5, 9),))
        options = {"q_indptr": case.q_indptr, "q_heads": case.q.shape[1], "dtype": dtype, "target": DEVICE}
        return ta.plan(case.kv, case.mask, **options).template

    assert template("float16").startswith("tensor cores, 16 rows")
    assert "no tensor cores: q float32" in template("float32")


def test_older_gpus_and_small_ones():
    old = replace(GPUS["cuda"], arch="sm_75")
    assert any("no mma.m16n8k16" in why for why in MmaTile().legal(spec(), old))
    assert isinstance(choose(spec(), old, 4), GpuTile)
    small = replace(GPUS["cuda"], arch="sm_86")
    assert any("bytes of shared memory" in why for why in MmaTile(columns=128).legal(spec(), small))


def test_the_choice_leaves_registers_for_the_rest():
    """On a GPU with much shared memory too, where larger tiles would fit."""
    assert choose(spec(d_qk=256, d_v=256), replace(GPUS["cuda"], arch="sm_90a"), 100) == MmaTile(columns=32)


# large trees -------------------------------------------------------------------------------------------------------

LARGE = {
    "star": ta.TokenTree.star(150),
    "chains": ta.TokenTree.from_parents([node - 1 if node % 30 else -1 for node in range(150)]),
    "binary": ta.TokenTree.from_parents([(node - 1) // 2 if node else -1 for node in range(150)]),
}


@pytest.mark.parametrize("mask", [lambda trees: ta.Tree(trees), lambda trees: ta.Tree(trees) & ta.Window(90)])
@pytest.mark.parametrize("name", LARGE)
def test_blocks_of_other_branches_are_not_visited(name, mask):
    trees = [LARGE[name], ta.TokenTree.chain(5), LARGE[name]]
    contexts = (70, 0, 3)
    lengths = [(tree.num_nodes, tree.num_nodes + before) for tree, before in zip(trees, contexts, strict=True)]
    case = make_case(
        np.random.default_rng(13), mask=mask(trees), lengths=lengths, trees=trees, contexts=contexts, dtype="float16",
        d_qk=64, q_heads=2, kv_heads=1,
    )  # fmt: skip
    assert_right(case)
    assert_right(case, FiberDevice(blocks=64))


def test_a_star_visits_its_root_and_its_own_nodes():
    star = ta.TokenTree.star(1000)
    kv_len = np.array([1000], np.int32)
    batch = Batch(np.array([0, 1000], np.int32), kv_len, (star,))
    seq, row_begin, num_rows = even_rows(batch.q_len, 64)
    tiles, mask = Tiles(np.full_like(seq, -1), seq, row_begin, num_rows), ta.Tree([star])
    bounds = mask.bounds(batch, spare=1)
    whole = find_visits(batch, mask, bounds, tiles, 1)
    visits = drop_unseen(whole, batch, mask, bounds, tiles, 1, 64)
    assert (whole.columns == 1000).all()
    assert visits.columns[1:-1].max() <= 3 * 64
    either = mask | ta.Window(5)
    bounds = either.bounds(batch, spare=1)
    everything = find_visits(batch, either, bounds, tiles, 1)
    assert drop_unseen(everything, batch, either, bounds, tiles, 1, 64) is everything
