"""What nvcc makes of the CUDA kernels: tensor-core instructions, no spills, room for two blocks a multiprocessor.

No GPU is needed, but nvcc and, for the instructions, nvdisasm (``pip install nvidia-cuda-nvdisasm``).
"""

from __future__ import annotations

import re
import shutil
import site
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import treeattn as ta
from treeattn.compiler import gpu_sources
from treeattn.kernels.spec import KernelSpec
from treeattn.schedules.gpu import TILES, choose
from treeattn.schedules.mma import MmaTile
from treeattn.targets import GPUS

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")

ARCHS = ("sm_80", "sm_90a")
REGISTERS, RESERVED = 65536, 1024  # of a multiprocessor; shared memory that a block takes besides its own
SHARED = {"sm_80": 164 << 10, "sm_90a": 228 << 10}  # CUDA programming guide, technical specifications
TREE, WINDOWED = ta.Tree([]), ta.Tree([]) & (ta.Window(1) | ta.Sink(1))


def nvdisasm():
    places = [Path(folder) / "nvidia" / "cu13" / "bin" / "nvdisasm" for folder in site.getsitepackages()]
    return shutil.which("nvdisasm") or next((str(place) for place in places if place.exists()), None)


def spec_of(d, dtype="float16", mask=TREE, **options):
    return KernelSpec(d, d, dtype, dtype, mask.form, **options)


def compiled(spec, tile, arch, folder, name="attention"):
    """Compile a kernel; returns its file, registers, bytes spilled, and bytes of static shared memory."""
    traits = replace(GPUS["cuda"], arch=arch)
    text = next(source.text for source in gpu_sources(spec, tile, traits) if source.name == name)
    return compiled_text(text, arch, folder)


def compiled_text(text, arch, folder):
    source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(text)
    flags = ["-O3", "-std=c++17", f"-arch={arch}", "--use_fast_math", "-Xptxas", "-v", "-cubin"]
    done = subprocess.run([NVCC, *flags, "-o", cubin, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", done.stderr))
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    static = re.search(r"(\d+) bytes smem", done.stderr)
    return cubin, registers, spilled, int(static[1]) if static else 0


SPECS = {
    "d64": spec_of(64),
    "d128": spec_of(128),
    "d128-bfloat16": spec_of(128, "bfloat16"),
    "d128-window": spec_of(128, mask=WINDOWED),
    "d128-causal": spec_of(128, mask=ta.Causal()),
    "d128-softcap": spec_of(128, logits=("softcap",)),
    "d256": spec_of(256),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("name", "rows"), [*((name, 64) for name in SPECS), ("d128", 16), ("d128", 32), ("d256", 16)])
def test_tensor_cores_without_spills(name, rows, arch, tmp_path):
    spec = SPECS[name]
    tile = choose(spec, replace(GPUS["cuda"], arch=arch), rows)
    cubin, registers, spilled, static = compiled(spec, tile, arch, tmp_path)
    assert spilled == 0
    shared = static + tile.dynamic_bytes(spec)
    assert shared == tile.shared_bytes(spec, GPUS["cuda"])
    if spec.d_qk <= 128:
        per_warp = -(-registers * 32 // 256) * 256
        assert 2 * per_warp * tile.warps <= REGISTERS
        assert 2 * (shared + RESERVED) <= SHARED[arch]
    if (tool := nvdisasm()) is None:
        pytest.skip("compiled; nvdisasm is not installed, so instructions were not counted")
    listing = subprocess.run([tool, cubin], capture_output=True, text=True, check=True).stdout
    products = tile.own_columns // 8 * (spec.d_qk // 16) + tile.own_columns // 16 * (spec.d_v // 8)
    kind = "HMMA.16816.F32.BF16" if "bfloat16" in name else "HMMA.16816.F32"
    assert len(re.findall(rf"\b{re.escape(kind)}\b", listing)) >= products
    loads = tile.own_columns // 16 * (spec.d_qk + spec.d_v) // 16
    assert len(re.findall(r"\bLDSM\.16\.M(?:T?)88\.4\b", listing)) >= loads
    assert "LDGSTS" in listing


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}rows")
def test_the_tiled_template_does_not_spill(tile, dtype, arch, tmp_path):
    spec = spec_of(128, dtype, WINDOWED)
    assert not tile.legal(spec, GPUS["cuda"])
    _, registers, spilled, _ = compiled(spec, tile, arch, tmp_path)
    assert spilled == 0
    assert 2 * registers * tile.threads <= REGISTERS


def test_merging_compiles(tmp_path):
    assert compiled(spec_of(128), MmaTile(), "sm_80", tmp_path, "merge")[2] == 0


def test_functions_for_tvm_keep_tensor_cores_and_shared_memory(tmp_path):
    """TVM's default pipeline sees shared memory through a plain pointer; nvcc still finds out that it is shared."""
    import tvm

    from treeattn import tvm_compat
    from treeattn.kernels.gpu.source import without_vendor_tools

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host={"kind": "llvm"})
    function = tvm_compat.tree_attn_with_paged_kv_cache(8, 32, 128, "float16", {}, target)
    with without_vendor_tools("cuda"):
        text = tvm.tirx.build(tvm.IRModule({"main": function}), target=target).imports[0].inspect_source()
    cubin, _, spilled, _ = compiled_text(text, "sm_90a", tmp_path)
    assert spilled == 0
    if (tool := nvdisasm()) is None:
        pytest.skip("compiled; nvdisasm is not installed, so instructions were not counted")
    listing = subprocess.run([tool, cubin], capture_output=True, text=True, check=True).stdout
    assert listing.count("HMMA.16816.F32") >= 64 // 8 * (128 // 16) + 64 // 16 * (128 // 8)
    assert "LDGSTS" in listing
    assert not re.findall(r"\b(?:LD|ST)(?:\.E)?\b(?!\w)", listing), "an access that does not know its memory"
