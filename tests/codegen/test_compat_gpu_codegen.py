"""`treeattn.tvm_compat` as text for five GPU targets, lowered by TVM's own pipelines: limits, bindings, barriers."""

from __future__ import annotations

import re
from functools import cache

import pytest
import tvm
from divergence import frames_of, shared_bytes

from treeattn import tvm_compat
from treeattn.errors import UnsupportedError
from treeattn.kernels.gpu.source import without_vendor_tools

TARGETS = {
    kind: tvm.target.Target({"kind": kind, **more}, host={"kind": "llvm"})
    for kind, more in {
        "cuda": {"arch": "sm_80"},
        "rocm": {"mcpu": "gfx90a"},
        "metal": {},
        "opencl": {},
        "webgpu": {},
    }.items()
}
HEADS, DTYPE, PAGE = (2, 8, 64), "float16", 16
ATTENTION = {
    "_attention_prefill": (*HEADS, DTYPE, True, {}),
    "_attention_prefill_ragged": (*HEADS, 32, DTYPE, {}),
    "_attention_prefill_mla": (8, 64, 16, DTYPE, False),
    "_attention_decode": (*HEADS, DTYPE, False, {}),
    "tree_attn": (*HEADS, DTYPE, {}),
    "tree_attn_with_paged_kv_cache": (*HEADS, DTYPE, {}),
    "_attention_sequence_prefill": (*HEADS, DTYPE),
    "_attention_sequence_prefill_with_mask": (*HEADS, DTYPE),
}
ELEMENTS = {
    "_merge_state_inplace": (8, 64, DTYPE),
    "_copy_single_page": (2, PAGE, 64, DTYPE),
    "_copy_single_page_mla": (PAGE, 80, DTYPE),
    "_compact_kv_copy": (2, 64, DTYPE),
}
IN_SCOPE = {
    "_kv_cache_transpose_append": (2, 64, DTYPE),
    "_kv_cache_transpose_append_mla": (80, DTYPE),
    "_kv_cache_debug_get_kv": (3, 2, 64, DTYPE),
    "_kv_cache_debug_get_kv_mla": (3, 80, DTYPE),
    "llama_rope_with_position_map": (1e4, 1.0, 64, 8, 2, DTYPE, {}),
}
"""Given no target: they are for the one in scope."""
BARRIER = "barrier(CLK_LOCAL_MEM_FENCE)"
BARRIERS = 7  # of the tiled template
BINDINGS = 10  # that TVM's web runtime asks for


def make(name, kind):
    target = TARGETS[kind]
    if name in IN_SCOPE:
        with target:
            return getattr(tvm_compat, name)(*IN_SCOPE[name])
    return getattr(tvm_compat, name)(*(ATTENTION | ELEMENTS)[name], target=target)


@cache
def text_of(name, kind, pipeline="default"):
    with without_vendor_tools(kind):
        module = tvm.tirx.build(tvm.IRModule({"main": make(name, kind)}), target=TARGETS[kind], pipeline=pipeline)
    (device,) = module.imports
    return str(device.inspect_source("asm" if kind == "rocm" else ""))


def threads_of(text, kind):
    """Threads of a block of each kernel."""
    pattern = {"cuda": r"__launch_bounds__\((\d+)\)", "webgpu": r"@workgroup_size\((\d+), 1, 1\)"}.get(kind)
    return [int(count) for count in re.findall(pattern, text)] if pattern else []


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", [*ELEMENTS, *IN_SCOPE, "_attention_decode"])
def test_every_target_builds_by_the_default_pipeline(name, kind):
    text = text_of(name, kind)
    assert all(count <= 256 for count in threads_of(text, kind))


@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind != "opencl"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_builds_for_every_target(name, kind):
    """By the shorter of TVM's pipelines; the default one runs on fibers, and below."""
    text = text_of(name, kind, "tirx")
    assert all(count <= 256 for count in threads_of(text, kind))
    kernels = text.split("// Function: ")[1:] if kind == "webgpu" else []
    assert all(kernel.count("var<storage") <= BINDINGS for kernel in kernels)
    if kind == "cuda":
        on_tensor_cores = name != "_attention_prefill_mla"  # values there are parts of keys
        assert ("tvm_builtin_ptx_mma" in text) == on_tensor_cores
    if kind == "rocm":
        assert re.findall(r"^\s+\.lds_size: ?|\.group_segment_fixed_size:\s+(\d+)", text, re.M)


@pytest.mark.parametrize("name", ATTENTION)
def test_barriers_stand_under_uniform_loops_and_branches(name):
    """TVM adds none to those of the template; a kernel that rotates fills its angles before the first."""
    text = text_of(name, "opencl")
    around = frames_of(text, BARRIER)
    rotates = ATTENTION[name][-1] == {}
    assert len(around) == (2 * BARRIERS + 1 if rotates else BARRIERS)
    assert not [frame for frames in around for frame in frames if frame.divergent]
    of_kernels = [shared_bytes(kernel) for kernel in text.split("__kernel void")]
    assert max(of_kernels) <= 16 * 1024
    assert "double" not in text, "many OpenCL devices have none"


@pytest.mark.parametrize("name", ["_merge_state_inplace"])
def test_barriers_of_merging(name):
    ((branch,),) = frames_of(text_of(name, "opencl"), BARRIER)
    assert not branch.divergent


def test_rope_inside_a_paged_tree_is_refused_where_it_would_bind_too_much():
    """By the host's code, when it is asked for; without it the kernel binds what TVM's does."""
    assert "rotary_mode 1 would bind 12 arrays" in make("tree_attn_with_paged_kv_cache", "webgpu").script()
    assert "rotary_mode 1 would" not in make("tree_attn_with_paged_kv_cache", "cuda").script()


@pytest.mark.parametrize("d", [1, 45])
def test_heads_of_an_odd_number_of_dims_have_no_kernel_for_rope(d):
    made = tvm_compat.tree_attn(1, 2, d, "float32", {}, TARGETS["opencl"])
    assert f"rotary_mode 1 turns pairs of dims, which {d} do not make" in made.script()
    (device,) = tvm.tirx.build(tvm.IRModule({"main": made}), target=TARGETS["opencl"], pipeline="tirx").imports
    assert device.inspect_source().count("__kernel void") == 2, "a declaration and a definition"


def test_no_target_in_scope_means_the_cpu():
    function = tvm_compat._kv_cache_transpose_append(2, 64, DTYPE)
    assert "blockIdx" not in function.script()
    assert "blockIdx" in make("_kv_cache_transpose_append", "cuda").script()


def test_what_fits_nowhere_is_refused_with_reasons():
    small = tvm.target.Target({"kind": "opencl", "max_num_threads": 64, "max_threads_per_block": 64})
    with pytest.raises(UnsupportedError, match="128 threads a block of 64"):
        tvm_compat._attention_prefill(*HEADS, DTYPE, False, {}, small)


def test_default_schedules_leave_the_functions_alone():
    from tvm.s_tir import dlight

    function = make("_kv_cache_transpose_append", "metal").with_attr("target", TARGETS["metal"])
    with TARGETS["metal"]:
        scheduled = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(tvm.IRModule({"append": function}))
    assert scheduled["append"].script() == function.script()


def test_relax_builds_tvms_cache_with_them(monkeypatch):
    """`TIRPagedKVCache` with these generators in the place of TVM's, through Relax's pipeline."""
    from tvm import relax, tirx
    from tvm.relax.frontend.nn.llm import kv_cache

    for name in (ATTENTION | ELEMENTS | IN_SCOPE).keys() & set(kv_cache.__all__):
        monkeypatch.setattr(kv_cache, name, getattr(tvm_compat, name))
    target, builder, built = TARGETS["opencl"], relax.BlockBuilder(), []
    sizes = [tirx.Var(f"size_{i}", "int64") for i in range(5)]
    shapes = [relax.Var(f"shape_{i}", relax.ShapeType([size])) for i, size in enumerate(sizes)]
    with target, builder.function("create", shapes):
        cache = kv_cache.TIRPagedKVCache(
            "mha", *sizes, relax.ShapeExpr([0, 2]), 2, 8, 2, 64, 64, 0, 0, kv_cache.RopeMode.NORMAL, 1, 10000, {},
            relax.op.zeros((), DTYPE), 64, False, DTYPE, target,
        )  # fmt: skip
        builder.emit_func_output(cache._expr)
    build = tvm.tirx.build
    monkeypatch.setattr(tvm.tirx, "build", lambda *args, **named: built.append(build(*args, **named)) or built[-1])
    relax.build(builder.finalize(), target, tir_pipeline="tirx")
    (host,) = built
    kernels = set(re.findall(r"__kernel void (\w+)\(", host.imports[0].inspect_source()))
    assert len(kernels) == 21, "14 functions, seven of which have a kernel for RoPE of their own"
