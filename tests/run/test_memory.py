"""Kernels touch what they were given and nothing else: guard pages, canaries, poisoned scratch memory.

Guard pages kill the process, so a failure here is a crash of pytest that names the test last begun.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from helpers import DTYPES, assert_same, attend, plan_of, rng, tile

import treeattn as ta
from treeattn.planner import Plan
from treeattn.schedules.tiles import TileConfig
from treeattn.testing import canaries, guarded, guarded_case, make_case, mask_kinds, poison

SIDES = ["after", "before"]


def guard_work(plan, side):
    """The same plan with its arrays, scratch memory included, between guard pages."""
    work, kernel = plan._launch.work, plan._launch.kernel
    arrays = {field.name: getattr(work, field.name) for field in fields(work)}
    arrays = {name: guarded(array, side) for name, array in arrays.items() if isinstance(array, np.ndarray)}
    launch = replace(plan._launch, work=replace(work, **arrays))
    floats = poison(np.zeros(plan.threads * kernel.workspace_floats, np.float32))
    bounds = np.zeros(plan.threads * kernel.spec.num_bounds * max(kernel.config.rows, 8), np.int32)
    launch.use_workspace(guarded(floats, side), guarded(bounds, side))
    return Plan(launch)


def check(case, side, **options):
    """Inputs, plan and scratch between guard pages, outputs between guard pages and then canaries."""
    want = attend(case)
    fenced = guarded_case(case, side)
    plan = guard_work(plan_of(fenced, **options), side)
    out = guarded(poison(np.empty(want[0].shape, case.q.dtype)), side)
    assert_same(plan.run(fenced.q, fenced.kv, out=out), want)
    buffer = canaries(want[0].shape, case.q.dtype)
    assert_same(plan.run(fenced.q, out=buffer.array), want)
    buffer.check()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("storage", ["paged", "ragged"])
@pytest.mark.parametrize("mask", mask_kinds())
def test_every_mask_between_guard_pages(mask, storage, side):
    check(make_case(rng(3), mask=mask, storage=storage), side)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [*zip(DTYPES, DTYPES, strict=True), ("float32", "bfloat16")])
@pytest.mark.parametrize("group", [1, 3, 7, 8, 9, 40])
def test_every_row_tile_between_guard_pages(group, dtype, kv_dtype, side):
    sizes = {"q_heads": group, "kv_heads": 1, "dtype": dtype, "kv_dtype": kv_dtype}
    check(make_case(rng(group), mask="tree", **sizes), side, threads=1)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("d", [1, 8, 46, 100])
def test_head_dims_between_guard_pages(d, side):
    """Tails of vectors are not read past the last element, nor written."""
    lengths = [(1, 40), (2, 35), (9, 60), (0, 3), (7, 7)]
    for heads, page_size in product((1, 4), (1, 3, 16)):
        check(make_case(rng(d), lengths=lengths, d_qk=d, q_heads=heads, kv_heads=1, page_size=page_size), side)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("d", [(192, 128), (8, 46), (46, 1), (1, 100)])
def test_two_head_dims_between_guard_pages(d, side):
    lengths = [(1, 40), (2, 35), (9, 60), (0, 3), (7, 7)]
    check(make_case(rng(), lengths=lengths, d_qk=d[0], d_v=d[1], storage="ragged"), side)


@pytest.mark.parametrize("side", SIDES)
def test_tiles_between_guard_pages(side):
    for config in (TileConfig(rows=16), TileConfig(rows=256, columns=60, few=(1, 2, 4, 8))):
        with tile(config):
            check(make_case(rng(), mask="tree", lengths=[(1, 120), (40, 40), (19, 133), (3, 70)]), side)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_between_guard_pages(threads, side):
    check(make_case(rng(), mask="tree&(window|sink)"), side, threads=threads)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lengths", [[(0, 0)], [(2, 0)], [(0, 3)], [(1, 1)]])
def test_next_to_nothing_between_guard_pages(lengths, side):
    check(make_case(rng(), mask="causal", lengths=lengths), side)


@pytest.mark.parametrize("rows", [1, 4, 8, 20])
def test_T18_no_read_before_the_table_of_nodes(rows):
    """Columns of the prefix have no node: their index in the table would be negative."""
    case = make_case(rng(), trees=[ta.TokenTree.star(rows)], contexts=[100], q_heads=1, kv_heads=1)
    for mask in (case.mask, case.mask & ta.Window(60), case.mask & (ta.Window(60) | ta.Sink(2))):
        check(replace(case, mask=mask), "before")


def test_poisoned_scratch():
    """NaN in every byte of scratch memory before each run."""
    for mask in mask_kinds():
        case = make_case(rng(4), mask=mask)
        plan, want = plan_of(case), attend(case)
        for floats, bounds in [plan._launch.workspace()] * 2:
            floats.view(np.uint8)[...] = bounds.view(np.uint8)[...] = 0xFF
            assert_same(plan.run(case.q), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_outputs_leave_the_gaps_alone(dtype):
    case = make_case(rng(), mask="tree", dtype=dtype)
    rows, heads, d = case.q.shape
    buffer = canaries((rows, heads * 2, d + 3), case.q.dtype)
    buffer.array.view(np.uint8)[...] = 0xA5
    out = buffer.array[:, ::2, 1 : d + 1]
    assert_same(attend(case, out=out), attend(case))
    buffer.check()
    out.view(f"u{out.itemsize}")[...] = int.from_bytes(b"\xa5" * out.itemsize, "little")
    assert (buffer.array.view(np.uint8) == 0xA5).all()


def test_nothing_is_read_of_a_sequence_without_rows():
    """Its keys may be NaN; its pages, unreferenced by anyone else, too."""
    case = make_case(rng(), mask="causal", lengths=[(0, 60), (3, 50), (0, 9)], storage="ragged")
    want = attend(case)
    k, v = case.kv.k.copy(), case.kv.v.copy()
    k[:60] = v[:60] = k[110:] = v[110:] = np.nan
    assert_same(attend(replace(case, kv=ta.RaggedKV(k, v, case.kv.kv_indptr))), want)
