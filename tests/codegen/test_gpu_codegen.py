"""GPU kernels as text, for five targets: every shape builds or says why not; limits, barriers, bounds."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from divergence import frames_of, shared_bytes

import treeattn as ta
from treeattn import device_work
from treeattn.compiler import gpu_sources
from treeattn.errors import UnsupportedError
from treeattn.kernels.gpu import arguments
from treeattn.kernels.gpu.attention import attention
from treeattn.kernels.gpu.source import KernelSource
from treeattn.kernels.spec import KernelSpec
from treeattn.schedules.gpu import MOST_SUMS, TILES, GpuTile, choose
from treeattn.targets import GPUS as ALL_GPUS
from treeattn.targets import GpuTraits

GPUS = ALL_GPUS | {"cuda": replace(ALL_GPUS["cuda"], arch="sm_75")}
"""Tensor cores have tests of their own."""
TREE = ta.Tree([]).form
WINDOWED = (ta.Tree([]) & (ta.Window(1) | ta.Sink(1))).form
DIMS = (8, 46, 56, 64, 80, 96, 100, 112, 128, 192, 256, 320, 384, 512, 576, 640)
DTYPES = ("float32", "float16", "bfloat16")
ROWS = (1, 16, 1000)
BARRIER = "barrier(CLK_LOCAL_MEM_FENCE)"
SHAPES = Path(os.environ.get("TREEATTN_SHAPES") or Path(__file__).parents[3] / "shared/data/model_shapes.json")


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("TREEATTN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def build(spec, traits, rows):
    """Tile and kernels; the kernels' limits are checked here, for every kernel any test builds."""
    tile = choose(spec, traits, rows)
    kernels = gpu_sources(spec, tile, traits)
    assert tile.threads <= traits.threads
    assert tile.shared_bytes(spec, traits) <= traits.shared_bytes
    for kernel in kernels:
        assert len(kernel.pointers) <= 8
        assert kernel.threads == tile.threads
    if traits.kind == "opencl":
        assert shared_bytes(kernels[0].text) == tile.shared_bytes(spec, traits)
    return tile, kernels


@lru_cache
def opencl(spec, rows=1000):
    return build(spec, GPUS["opencl"], rows)[1][0].text


# every shape, every target ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("d", DIMS)
def test_every_size_builds(target, d):
    """Group, page size and head counts are data; the dtype and the rows of the tile vary with d."""
    which = DIMS.index(d)
    dtype, rows = DTYPES[which % 3], ROWS[which // 3 % 3]
    if target == "webgpu" and dtype == "bfloat16":
        with pytest.raises(UnsupportedError, match="bfloat16 output"):
            choose(KernelSpec(d, d, dtype, dtype, TREE), GPUS[target], rows)
        build(KernelSpec(d, d, "float16", dtype, TREE), GPUS[target], rows)
        return
    build(KernelSpec(d, d, dtype, dtype, TREE), GPUS[target], rows)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize(
    "spec",
    [
        KernelSpec(64, 64, "float32", "bfloat16", WINDOWED, moved=True),
        KernelSpec(576, 512, "float16", "float16", TREE, shared=True),
        KernelSpec(192, 128, "float16", "float16", ta.Causal().form, logits=("softcap",)),
        KernelSpec(80, 80, "float32", "float16", TREE, rope=("neox", 40), logits=("softcap", "alibi", "sinks")),
        KernelSpec(64, 64, "float32", "float32", ta.Full().form, rope=("gptj", 64)),
    ],
    ids=["windowed", "latent", "mixed sizes", "every part", "full"],
)
def test_every_part_builds(target, spec):
    build(spec, GPUS[target], 1000)


@pytest.mark.parametrize("target", GPUS)
def test_shapes_of_models_build(target):
    if not SHAPES.exists():
        pytest.skip(f"no {SHAPES.name} beside the repository; TREEATTN_SHAPES names another place")
    shapes = {(model["d_qk"], model["d_v"], model["group"]) for model in json.loads(SHAPES.read_text())}
    for d_qk, d_v, group in sorted(shapes):
        spec = KernelSpec(d_qk, d_v, "float16", "float16", TREE)
        for rows in (group, 64 * group):
            assert choose(spec, GPUS[target], rows).legal(spec, GPUS[target]) == []
    for d_qk, d_v in sorted({shape[:2] for shape in shapes}):
        build(KernelSpec(d_qk, d_v, "float16", "float16", TREE), GPUS[target], 1000)


@pytest.mark.parametrize("d", [320, 384, 640])
@pytest.mark.parametrize("shared_kib", [16, 48])
def test_t17_tiles_of_unusual_sizes_are_legal(d, shared_kib):
    traits = GpuTraits("cuda", 1024, shared_kib * 1024, arch="sm_75")
    for rows in ROWS:
        build(KernelSpec(d, d, "float16", "float16", TREE), traits, rows)


def test_what_fits_nowhere_is_refused_with_reasons():
    spec = KernelSpec(64, 64, "float32", "float32", TREE)
    with pytest.raises(UnsupportedError, match=r"bytes of shared memory of 1024"):
        choose(spec, GpuTraits("opencl", 256, 1024), 1)
    with pytest.raises(UnsupportedError, match=r"128 threads a block of 64"):
        choose(spec, GpuTraits("opencl", 64, 16384), 1)
    with pytest.raises(UnsupportedError, match=f"accumulators a thread of {MOST_SUMS}"):
        choose(KernelSpec(64, 4096, "float32", "float32", TREE), GPUS["cuda"], 1)


# barriers and threads ----------------------------------------------------------------------------------------------

SPECS = [
    KernelSpec(64, 64, "float32", "float32", WINDOWED),
    KernelSpec(46, 46, "float32", "bfloat16", TREE, rope=("neox", 46), logits=("softcap", "alibi", "sinks")),
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("spec", SPECS, ids=["windowed", "every part"])
def test_barriers_stand_under_uniform_loops_and_branches(spec, rows):
    around = frames_of(opencl(spec, rows), BARRIER)
    assert len(around) >= 6
    for frames in around:
        assert not [frame for frame in frames if frame.divergent]
        assert all(frame.is_loop for frame in frames)
        assert len(frames) <= 3  # spans, blocks of columns, chunks of dims


def test_a_divergent_branch_is_noticed():
    text = opencl(SPECS[0])
    broken = text.replace(BARRIER, "if (get_local_id(0) < 16) {\n " + BARRIER + ";\n}", 1)
    assert any(frame.divergent for frames in frames_of(broken, BARRIER) for frame in frames)


@pytest.mark.parametrize("rows", ROWS)
def test_t16_all_threads_share_the_softmax_and_no_barrier_is_in_the_column_loop(rows):
    """Weights are written under no divergent branch; loops over columns hold no barrier."""
    text = opencl(SPECS[0], rows)
    weights = frames_of(text, "-1.000000e+00f")
    tile = choose(SPECS[0], GPUS["opencl"], rows)
    assert len(weights) == tile.rows_each * tile.columns_each
    assert not [frame for frames in weights for frame in frames if frame.divergent]
    products = re.findall(
        r"for \(int \w+ = 0; \w+ < [^{]*\{((?:(?!\bfor\b|\}).)*\*(?:(?!\bfor\b|\}).)*)\}", text, re.DOTALL
    )
    assert products
    assert not [body for body in products if "barrier" in body]


# arguments, caches -------------------------------------------------------------------------------------------------


def test_host_and_kernels_agree_on_the_layout():
    assert device_work.PARTS == arguments.PARTS
    assert device_work.TABLES == arguments.TABLES
    assert device_work.VALUES == arguments.VALUES
    assert device_work.CONSTANTS == arguments.TABLE_HEADER


def test_offsets_are_64_bits_where_the_target_has_them():
    spec = SPECS[0]
    for target, traits in GPUS.items():
        kernel = build(spec, traits, 1)[1][0]
        kinds = dict(zip(kernel.scalars, kernel.scalar_dtypes, strict=True))
        assert kinds["k_page"] == ("int32" if target == "webgpu" else "int64")
    assert re.search(r"convert_long\(\w+\)\) \* k_page", opencl(spec))


def test_a_second_build_gives_the_same_text():
    spec, traits = SPECS[1], GPUS["opencl"]
    tile = choose(spec, traits, 1000)
    assert attention(spec, tile, traits).script() == attention(spec, tile, traits).script()


def test_sources_come_back_from_disk(monkeypatch):
    from treeattn import compiler

    spec, traits = SPECS[0], GPUS["metal"]
    tile = choose(spec, traits, 1)
    made = gpu_sources(spec, tile, traits)
    monkeypatch.setattr(compiler, "_generate", lambda *_: pytest.fail("generated again"))
    assert gpu_sources(spec, tile, traits) == made
    assert KernelSource.from_json(made[0].to_json()) == made[0]


def test_a_tile_is_data():
    assert choose(SPECS[0], GPUS["cuda"], 1) == TILES[0]
    assert GpuTile(8, 16, 2, 2).rows == 16
