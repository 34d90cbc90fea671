"""The machine of fibers itself: it computes as the PTX manual says, and notices what a GPU would not forgive."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest

import treeattn as ta
from treeattn.errors import CompileError, UnsupportedError
from treeattn.testing import assert_within_budget, fibers, make_case

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA text runs on the CPU by way of g++")

ASM = {
    "mma_f16": "mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32",
    "mma_bf16": "mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32",
    "ldmatrix": "ldmatrix_sync_aligned_m8n8_x4_shared_b16",
    "ldmatrix_t": "ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16",
    "copy": "cp_async_cg_async_cg_shared_global_16",
    "commit": "cp_async_commit_group_async_commit_group",
    "wait": "cp_async_wait_group_async_wait_group_0",
}


def load(parameters, bodies):
    """Kernels of the same parameters, by name."""
    text = ""
    for name, body in bodies.items():
        for short, helper in ASM.items():
            body = body.replace(f"PTX_{short}(", f"tvm_builtin_ptx_{helper}(")
        head = f'extern "C" __global__ void __launch_bounds__(64) {name}({parameters})'
        text += f"{head};\n{head} {{\n{body}\n}}\n"
    return fibers.load(text)


def run(parameters, body, *arguments, threads=64, seed=0):
    load(parameters, {"k": body}).launch("k", arguments, [1], [threads], seed=seed)


# it computes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("mma_f16", np.float16), ("mma_bf16", ml_dtypes.bfloat16)])
def test_a_product_of_fragments_from_shared_memory(name, dtype):
    """``A[16, 16] @ B[16, 8] + C``: A by ldmatrix, B (rows are k) by its transposing form, C and D by hand."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    c, d = rng.standard_normal((16, 8)).astype(np.float32), np.zeros((16, 8), np.float32)
    body = f"""
      __shared__ alignas(64) ushort sa[384];
      __shared__ alignas(64) ushort sb[384];
      int lane = ((int)threadIdx.x);
      for (int i = lane; i < 256; i += 32) sa[i / 16 * 24 + i % 16] = a[i];
      for (int i = lane; i < 128; i += 32) sb[i / 8 * 24 + i % 8] = b[i];
      __syncthreads();
      uint fa[4], fb[2]; float s[4], z[4];
      PTX_ldmatrix(fa[0], fa[1], fa[2], fa[3], __cvta_generic_to_shared(&sa[lane % 16 * 24 + lane / 16 * 8]));
      PTX_ldmatrix_t(fb[0], fb[1], __cvta_generic_to_shared(&sb[lane % 16 * 24]));
      for (int i = 0; i < 4; i++) z[i] = c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
      PTX_{name}(s[0], s[1], s[2], s[3], fa[0], fa[1], fa[2], fa[3], fb[0], fb[1], z[0], z[1], z[2], z[3]);
      for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = s[i];"""
    run("ushort* a, ushort* b, float* c, float* d", body, a.view(np.uint16), b.view(np.uint16), c, d, threads=32)
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(d, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_shuffles_and_barriers(seed):
    """The sum of all threads' numbers, by a butterfly in each warp and shared memory between them."""
    body = """
      __shared__ float parts[4];
      float sum = x[((int)threadIdx.x)];
      for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step, 32);
      if (((int)threadIdx.x) % 32 == 0) parts[((int)threadIdx.x) / 32] = sum;
      __syncthreads();
      x[((int)threadIdx.x)] = parts[0] + parts[1] + parts[2] + parts[3];"""
    x = np.arange(128, dtype=np.float32)
    run("float* x", body, x, threads=128, seed=seed)
    assert (x == 127 * 64).all()


def test_every_block_and_thread_runs_once():
    body = (
        "count[((((int)blockIdx.y) * 5 + ((int)blockIdx.x)) * 2 + ((int)threadIdx.y)) * 3 + ((int)threadIdx.x)] += 1;"
    )
    count = np.zeros(2 * 5 * 6, np.int32)
    load("int* count", {"k": body}).launch("k", [count], [5, 2], [3, 2])
    assert (count == 1).all()


COPY = """
  __shared__ alignas(64) float a[128];
  int t = ((int)threadIdx.x);
  if (t < 32) PTX_copy(__cvta_generic_to_shared(&a[t * 4]), &x[t * 4]);
  PTX_commit();
  %s
  __syncthreads();
  y[t] = a[127 - t];"""


def test_an_asynchronous_copy_lands_at_its_wait():
    x, y = np.arange(128, dtype=np.float32), np.zeros(64, np.float32)
    run("float* x, float* y", COPY % "PTX_wait();", x, y)
    np.testing.assert_array_equal(y, x[:63:-1])


# it notices -------------------------------------------------------------------------------------------------------

FAULTS = {
    "a copy that nobody waited for": ("has not landed", COPY % ""),
    "a read past the end": ("outside of every buffer, nearest to pointer argument 0", "y[0] = x[128];"),
    "a write before the beginning": ("outside of every buffer, nearest to pointer argument 1", "y[-1] = 0;"),
    "shared memory that nobody wrote": (
        "which nobody has written",
        "__shared__ float a[65]; a[threadIdx.x] = 1; __syncthreads(); y[0] = a[64];",
    ),
    "an index past shared memory": (
        "outside of its arrays",
        "__shared__ float a[64]; __shared__ float b[64]; a[threadIdx.x + 1] = 1; b[threadIdx.x] = 1;",
    ),
    "a read that does not wait for the write": (
        "without a barrier between|which nobody has written",
        "__shared__ float a[64]; a[threadIdx.x] = 1; y[threadIdx.x] = a[63 - threadIdx.x];",
    ),
    "a write that does not wait for the readers": (
        "without a barrier between",
        "__shared__ float a[64]; a[threadIdx.x] = 1; __syncthreads();"
        "y[threadIdx.x] = a[threadIdx.x / 2]; a[threadIdx.x] = 2;",
    ),
    "two writes to one place": ("written by thread", "__shared__ float a[64]; a[threadIdx.x / 2] = 1;"),
    "a barrier that one lane waits at alone": ("deadlock", "if (threadIdx.x == 3) __syncthreads(); else __syncwarp();"),
    "barriers in two branches": (
        "other threads wait at that in line",
        "if (threadIdx.x < 32)\n  __syncthreads();\nelse\n  __syncthreads();",
    ),
    "lanes at different instructions": (
        "different collective",
        "if (threadIdx.x < 3) __syncwarp(); else x[threadIdx.x] = __shfl_sync(~0u, x[0], 0);",
    ),
}


@pytest.fixture(scope="module")
def faulty():
    return load("float* x, float* y", {f"k{i}": body for i, (_, body) in enumerate(FAULTS.values())})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_stops_the_launch(what, seed, faulty):
    x, y = np.zeros(128, np.float32), np.zeros(64, np.float32)
    with pytest.raises(fibers.KernelFault, match=FAULTS[what][0]):
        faulty.launch(f"k{list(FAULTS).index(what)}", [x, y], [1], [64], seed=seed)


def test_a_fault_leaves_the_machine_usable():
    x = np.zeros(64, np.float32)
    with pytest.raises(fibers.KernelFault):
        run("float* x", "__shared__ float a[64]; x[0] = a[0];", x)
    run("float* x", "x[((int)threadIdx.x)] = 1;", x)
    assert (x == 1).all()


def test_unknown_instructions_are_refused():
    helper = '__forceinline__ __device__ void tvm_builtin_ptx_wgmma_fence() {\n  asm volatile("wgmma.fence;");\n}\n'
    head = 'extern "C" __global__ void k(float* x)'
    with pytest.raises(UnsupportedError, match="tvm_builtin_ptx_wgmma_fence"):
        fibers.load(f"{helper}{head};\n{head} {{ tvm_builtin_ptx_wgmma_fence(); }}\n")
    with pytest.raises(UnsupportedError, match="asm"):
        fibers.load(f'{head};\n{head} {{ asm volatile("bar.sync 0;"); }}\n')
    with pytest.raises(CompileError, match="__nanosleep"):
        fibers.load(f"{head};\n{head} {{ __nanosleep(3); }}\n")


# TVM's own kernel -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tvm_tree():
    import tvm
    from tvm.relax.frontend.nn.llm.tree_attn import tree_attn

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host={"kind": "llvm"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_COMPILE_FORCE_FALLBACK", "1")
        built = tvm.tirx.build(tvm.IRModule({"main": tree_attn(2, 8, 64, "float16", {}, target)}), target=target)
    return fibers.load(built.imports[0].inspect_source())


def run_tvm(module, nodes, spare_rows):
    rng = np.random.default_rng(5)
    trees = [ta.TokenTree.from_parents([-1, *((np.arange(1, count) - 1) // 2)]) for count in nodes]
    order = [np.argsort(tree.intervals[:, 0]) for tree in trees]  # TVM wants nodes in depth-first order
    rank = [np.append(np.argsort(index), -1) for index in order]
    trees = [ta.TokenTree.from_parents(r[t.parents[o]]) for t, o, r in zip(trees, order, rank, strict=True)]
    case = make_case(
        rng, mask=ta.Tree(trees), trees=trees, dtype="float16", storage="ragged", q_heads=8, kv_heads=2, d_qk=64,
        logit_scale=8,
    )  # fmt: skip
    out, lse = np.zeros_like(case.q), np.zeros(case.q.shape[:2], np.float32)
    intervals = np.concatenate([*(tree.intervals for tree in trees), np.zeros((spare_rows, 2), np.int32)])
    positions = np.arange(len(case.q), dtype=np.int32)
    q_indptr = np.asarray(case.q_indptr)
    module.launch(
        "batch_tree_attn_kernel",
        [case.kv.k, q_indptr, lse, intervals.astype(np.int32), q_indptr, out, case.q, q_indptr, positions, case.kv.v,
         len(q_indptr), 0, 0, 0, 0, 0, 1.0, 1e4, 0, 64**-0.5],
        [16, 2], [32, 4],
    )  # fmt: skip
    return out, lse, case


def test_tvms_own_kernel_agrees_with_the_oracle(tvm_tree):
    assert_within_budget(*run_tvm(tvm_tree, (17, 1, 42), spare_rows=8))


def test_tvms_own_kernel_reads_past_its_tree(tvm_tree):
    """A fault of TVM 0.27: padding rows of the last tile read the order of nodes that are not there."""
    with pytest.raises(fibers.KernelFault, match="read of 4 bytes outside of every buffer"):
        run_tvm(tvm_tree, (17, 1, 42), spare_rows=0)
