"""Exports for every target: the manifest says of the text what the text says itself; folders are whole or untouched."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import treeattn as ta
from treeattn.ahead import compiled, definitions, export, vendor
from treeattn.ahead.describe import KEYS, MASKS, describe
from treeattn.cli import main
from treeattn.errors import CompileError, TreeAttnError, UnsupportedError
from treeattn.kernels.gpu import arguments
from treeattn.targets import GPUS, KNOWN, GpuTraits, code_target

WINDOWED = {"d_qk": 64, "q_dtype": "float16", "mask": "tree & (window | sink)", "softcap": True, "sink_logits": True}
SPECS = [
    {"d_qk": 32, "q_dtype": "float32", "mask": "tree"},
    WINDOWED,
    {"d_qk": 80, "d_v": 48, "q_dtype": "float32", "kv_dtype": "bfloat16", "mask": "causal", "rope": {"rotary_dim": 64}},
    {"d_qk": 40, "d_v": 32, "q_dtype": "float16", "mask": "full", "shared": True, "moved": True, "alibi": True},
]
SIGNATURES = {
    "cuda": r'extern "C" __global__ void [^\n]*?\b{}\(([^)]*)\)',
    "opencl": r"__kernel void {}\(([^)]*)\)",
    "metal": r"kernel void {}\(([^{{]*)\) \{{",
}
SIZES = {"float": 4, "int": 4, "long": 8, "int64_t": 8, "f32": 4, "i32": 4, "u32": 4, "half": 2, "ushort": 2}


def read(folder):
    return json.loads((folder / "manifest.json").read_text())


@pytest.fixture(scope="module", params=GPUS)
def exports(request, tmp_path_factory):
    """Folders of all specs for one target, without the vendor's compiler, which has a test of its own."""
    root = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vendor, "nvcc", lambda text, arch: ({}, {}))
        return [ta.compile(spec, request.param).export(root / str(i)).parent for i, spec in enumerate(SPECS)]


def functions(folder):
    (kernel,) = read(folder)["kernels"]
    for function in kernel["functions"].values():
        yield function, (folder / function["source"]).read_text()


def test_arguments_are_those_of_the_text(exports):
    for folder in exports:
        kind = read(folder)["target"]["kind"]
        for function, text in functions(folder):
            named = [argument["name"] for argument in function["arguments"]]
            pointers = [a["name"] for a in function["arguments"] if a["kind"] == "buffer"]
            scalars = named[len(pointers) :]
            if kind == "webgpu":
                found = re.findall(r"@binding\((\d+)\) var<storage, (\w+)> (\w+)", text)
                accesses = [a["access"] for a in function["arguments"] if a["kind"] == "buffer"]
                assert found == [(str(i), accesses[i], name) for i, name in enumerate(pointers)]
                uniform = re.search(r"struct PODArgs \{(.*?)\}", text, re.DOTALL)[1]
                assert re.findall(r"(\w+): \w+", uniform) == [*scalars, "packGridDimX"]
            elif kind == "rocm":
                metadata = text[text.index("amdhsa.kernels") :]
                assert metadata.count("global_buffer") == len(pointers)
                assert re.findall(r"\.name: +(\w+)\n +\.offset", metadata) == scalars
            else:
                signature = re.search(SIGNATURES[kind].format(function["entry"]), text)[1]
                found = re.findall(r"(\w+)(?: \[\[ buffer\(\d+\) \]\])?(?:,|$)", signature)
                if kind == "metal":
                    assert found[: len(pointers)] == pointers
                    assert (
                        re.findall(r"(\w+)(?:\[2\])?;", re.search(r"args_t \{(.*?)\}", text, re.DOTALL)[1]) == scalars
                    )
                else:
                    assert found == named


def test_everything_has_a_meaning(exports):
    for folder in exports:
        (kernel,) = read(folder)["kernels"]
        packed = kernel["packed"]
        assert [part["name"] for part in packed["plan"]["parts"]] == list(arguments.PARTS)
        assert [field["name"] for field in packed["plan"]["header"]] == list(arguments.HEADER)
        assert [field["name"] for field in packed["tables"]["header"]] == list(arguments.TABLE_HEADER)
        for part in packed["plan"]["parts"]:
            width = re.fullmatch(r"[\w +]+, (\d)", part["shape"])
            assert len(part.get("fields", ())) == (int(width[1]) if width else 0)
        for function in kernel["functions"].values():
            assert all(argument["meaning"] for argument in function["arguments"])


def test_blocks_and_shared_memory(exports):
    for folder, spec in zip(exports, SPECS, strict=True):
        kind = read(folder)["target"]["kind"]
        (attention, text), (merge, merge_text) = functions(folder)
        threads = attention["launch"]["block"][0]
        pattern = {
            "cuda": r"__launch_bounds__\((\d+)",
            "webgpu": r"@workgroup_size\((\d+)",
            "rocm": r"max_flat_workgroup_size: (\d+)",
        }.get(kind)
        if kind == "rocm":
            assert threads <= int(re.search(pattern, text)[1])
            assert attention["resources"]["vector_registers"] > 16
            assert attention["resources"]["static_shared_bytes"] <= attention["resources"]["shared_bytes"]
        elif pattern:
            assert int(re.search(pattern, text)[1]) == threads
        assert attention["resources"]["shared_bytes"] <= code_target(kind).dynamic_bytes
        declared = re.findall(
            r"(?:__local|__shared__(?: alignas\(\d+\))?|threadgroup) (\w+) \w+\[(\d+)\];"
            r"|var<workgroup> \w+ : array<(\w+), (\d+)>;",
            text,
        )
        total = (
            sum(SIZES[a or c] * int(b or d) for a, b, c, d in declared) + attention["launch"]["dynamic_shared_bytes"]
        )
        if kind != "rocm":
            assert 0.9 * attention["resources"]["shared_bytes"] < total <= attention["resources"]["shared_bytes"], spec
        assert not re.search(r"__local|__shared__|threadgroup float|var<workgroup>", merge_text)
        assert merge["launch"]["num_blocks"] == "num_merges"


def test_assembly_names_a_target_that_assemblers_know(exports):
    """``clang --target=amdgcn-amd-amdhsa -mcpu=gfx90a`` compares its own with both."""
    for folder in exports:
        manifest = read(folder)["target"]
        if manifest["kind"] == "rocm":
            for _, text in functions(folder):
                assert re.findall(r"amdgcn-amd-\S+?(?=\"|\n)", text) == [f"amdgcn-amd-amdhsa--{manifest['mcpu']}"] * 2


def test_manifest_repeats_the_spec(exports):
    for folder, spec in zip(exports, SPECS, strict=True):
        manifest = read(folder)
        (kernel,) = manifest["kernels"]
        assert kernel["spec"] == describe(compiled.read_spec(spec))
        assert manifest["files"] == sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")
        assert manifest["format"] == 1


def test_source_is_the_texts():
    kernel = ta.compile(SPECS[0], "opencl")
    assert kernel.source.count("__kernel void") == 4  # each declared, then defined
    assert isinstance(kernel.traits, GpuTraits)


def test_rows_choose_the_tile():
    tiles = [ta.compile(SPECS[0], "opencl", rows=rows).tile.rows for rows in (1, 16, 17, None)]
    assert tiles == sorted(tiles)
    assert len(set(tiles)) > 1


# --- targets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"kind": "cuda", "arch": "sm_90a"}, {"kind": "cuda", "arch": "sm_90a"}),
        ({"kind": "rocm", "mcpu": "gfx942"}, {"kind": "rocm", "arch": "gfx942"}),
        ({"kind": "opencl", "max_num_threads": 128}, {"threads": 128}),
        ({"kind": "webgpu", "max_shared_memory_per_block": 32768}, {"shared_bytes": 32768}),
        ("llvm-neon", {"vector": "neon"}),
        ({"kind": "llvm", "mcpu": "znver4", "mtriple": "x86_64-linux-gnu"}, {"vector": "avx512", "vector_bits": 512}),
        ({"kind": "llvm", "mcpu": "apple-m1", "mtriple": "arm64-apple-macos"}, {"vector": "neon"}),
        ({"kind": "llvm", "mcpu": "x86-64", "mtriple": "x86_64-linux-gnu"}, {"vector": "plain"}),
    ],
)
def test_targets_in_tvms_form(target, expected):
    traits = code_target(target)
    assert {name: getattr(traits, name) for name in expected} == expected
    assert code_target(traits) is traits


@pytest.mark.parametrize(
    "target",
    ["abacus", "vulkan", 3, {}, {"kind": ["cuda"]}, {"kind": "cuda", "mcpu": "sm_80"}, {"kind": "cuda", "arch": "80"},
     {"kind": "cuda", "arch": 80}, {"kind": "metal", "max_num_threads": "8"}, {"kind": "opencl", "max_num_threads": 0},
     {"kind": "llvm", "mcpu": "nonsense"}, {"kind": "llvm", "mcpu": 3}, {"kind": "llvm", "arch": "x"},
     {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}],
)  # fmt: skip
def test_other_targets_are_refused(target):
    with pytest.raises(UnsupportedError, match="target: expected"):
        code_target(target)


def test_a_tile_that_does_not_fit_says_why():
    with pytest.raises(UnsupportedError, match="bytes of shared memory of 1024"):
        ta.compile(SPECS[0], {"kind": "opencl", "max_shared_memory_per_block": 1024})


@pytest.mark.parametrize("rows", [0, -1, True, "8"])
def test_bad_rows(rows):
    with pytest.raises(ta.TreeAttnError, match=r"rows: expected (1 to|an integer)"):
        ta.compile(SPECS[0], "opencl", rows=rows)


# --- CUDA's compiler -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(next(filter(None, map(shutil.which, vendor.NVCC)), None) is None, reason="nvcc is not installed")
def test_cubin_and_ptx(tmp_path):
    kernel = ta.compile(WINDOWED, {"kind": "cuda", "arch": "sm_90a"})
    folder = kernel.export(tmp_path / "export").parent
    for function, _ in functions(folder):
        assert (folder / function["cubin"]).read_bytes()[:4] == b"\x7fELF"
        assert f".entry {function['entry']}" in (folder / function["ptx"]).read_text()
        assert 16 <= function["resources"]["registers"] <= 255
        assert function["resources"]["spilled_bytes"] == 0
    with pytest.raises(CompileError, match="nvcc refused the kernel for sm_999"):
        ta.compile(SPECS[0], {"kind": "cuda", "arch": "sm_999"}).export(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_without_nvcc_there_is_source_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(vendor.shutil, "which", lambda name: None)
    folder = ta.compile(SPECS[0], "cuda").export(tmp_path / "export").parent
    assert read(folder)["files"] == ["attention.cu", "attention_merge.cu"]


# --- models --------------------------------------------------------------------------------------------------------

GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 2048, "head_dim": 64}


def test_one_kernel_for_each_kind_of_layer(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GEMMA))
    out = tmp_path / "out"
    assert main(["compile", "--target", "webgpu", "--hf-config", str(config), "-o", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    layers = {kernel["name"]: kernel["layers"] for kernel in read(out)["kernels"]}
    assert layers == {"attention_window": [0, 1, 2, 3, 4, 6, 7, 8, 9, 10], "attention_full": [5, 11]}
    assert {kernel["name"]: kernel["layers"] for kernel in report["kernels"]} == layers
    assert set(report["files"]) == {path.name for path in out.iterdir()} - {"manifest.json"}


def test_a_model_by_layer():
    model = ta.spec_from_hf_config(GEMMA)
    with pytest.raises(UnsupportedError, match="layer: expected one of 12, since they need several kernels"):
        ta.compile(model, "opencl")
    kernels = [ta.compile(model, "opencl", layer=layer) for layer in (0, 5)]
    assert [describe(kernel.spec)["mask"] for kernel in kernels] == ["tree & window", "tree"]
    for layer in (12, -1, "0"):
        with pytest.raises(UnsupportedError, match="layer: expected 0 to 11"):
            ta.compile(model, "opencl", layer=layer)
    with pytest.raises(UnsupportedError, match="layer: expected one with a ModelSpec"):
        ta.compile(SPECS[0], "opencl", layer=0)


# --- folders -------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel():
    return ta.compile(SPECS[0], "opencl")


def test_a_folder_with_files_is_left_alone(kernel, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("mine")
    with pytest.raises(UnsupportedError, match="expected an empty or new folder"):
        kernel.export(tmp_path)
    assert list(tmp_path.iterdir()) == [own]
    kernel.export(tmp_path, force=True)
    assert own.read_text() == "mine"
    ta.compile(SPECS[0], "webgpu").export(tmp_path, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {*read(tmp_path)["files"], "manifest.json", "own.txt"}
    assert all(name.endswith(".wgsl") for name in read(tmp_path)["files"])
    with pytest.raises(UnsupportedError, match="expected a folder, got the file"):
        kernel.export(own, force=True)


def test_an_empty_folder_will_do(kernel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kernel.export(".")
    assert read(tmp_path)["kernels"]


def test_nothing_is_left_of_an_export_that_fails(kernel, tmp_path, monkeypatch):
    monkeypatch.setattr(export.json, "dumps", lambda *_, **__: 1 / 0)
    for folder in (tmp_path / "new", tmp_path / "a" / "b"):
        with pytest.raises(ZeroDivisionError):
            kernel.export(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_a_damaged_manifest_does_not_direct_deletion(kernel, tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "export"
    outside.write_text("mine")
    kernel.export(folder)
    (folder / "manifest.json").write_text('{"files": ["../outside"]}')
    kernel.export(folder, force=True)
    assert outside.exists()


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--target", "opencl"], "give one of --spec and --hf-config"),
        (["--target", "abacus", "--spec", "spec.json"], "target: expected one of llvm"),
        (["--target", "{", "--spec", "spec.json"], "--target: expected a name or a JSON object"),
        (["--target", '{"kind": "cuda", "fly": 1}', "--spec", "spec.json"], "got fly"),
        (["--target", "opencl", "--spec", "none.json"], "No such file"),
        (["--target", "opencl", "--spec", "bad.json"], "spec: expected keys of"),
        (["--target", "opencl", "--spec", "torn.json"], "expected a JSON object"),
        (["--target", "opencl", "--hf-config", "torn.json"], "expected JSON"),
        (["--target", "opencl", "--spec", "spec.json", "--dtype", "float16"], "go with --hf-config"),
        (["--target", "opencl", "--spec", "spec.json", "--rows", "0"], "--rows"),
        (["--spec", "spec.json"], "--target"),
    ],
)
def test_bad_input_gives_one_line(options, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.json").write_text(json.dumps(SPECS[0]))
    (tmp_path / "bad.json").write_text(json.dumps(SPECS[0] | {"fly": 1}))
    (tmp_path / "torn.json").write_text("{")
    assert main(["compile", *options, "-o", "out"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert text in error
    assert not (tmp_path / "out").exists()


def test_the_command_writes_what_the_function_does(kernel, tmp_path, capsys):
    (tmp_path / "spec.json").write_text(json.dumps(SPECS[0]))
    arguments = ["compile", "--target", "opencl", "--spec", str(tmp_path / "spec.json"), "-o", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert "attention.cl" in capsys.readouterr().out
    kernel.export(tmp_path / "other")
    for path in (tmp_path / "other").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert main(arguments) == 2
    assert "holds files" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0


# --- calls ---------------------------------------------------------------------------------------------------------


def test_a_call_where_the_target_is_not_at_hand():
    import numpy as np

    q = np.zeros((1, 1, 32), "float32")
    kv, mask = ta.RaggedKV(q, q, [0, 1]), ta.Tree([ta.TokenTree.from_parents([-1])])
    kernel = ta.compile(SPECS[0], "metal")
    with pytest.raises(TreeAttnError, match="target: expected"):
        kernel(q, kv, mask)
    with pytest.raises(UnsupportedError, match="kernel: expected a call of"):
        kernel(q, kv, ta.Causal())
    with pytest.raises(UnsupportedError, match="target: expected none"):
        kernel(q, kv, mask, target="llvm")


def test_info_lists_the_targets(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compile"] == ["llvm", *KNOWN, *GPUS]


def test_every_definition_is_used():
    """No argument, test or part without a definition, and none left over."""
    from treeattn.kernels import arguments as cpu
    from treeattn.masks import SPANS

    assert set(definitions.TESTS) == set(SPANS)
    names = {*cpu.POINTERS, *cpu.SCALARS, *arguments.POINTERS, *arguments.OFFSETS, *arguments.PARTS, *arguments.TABLES}
    names |= {*arguments.VALUES, *arguments.TABLE_HEADER, "num_blocks"}
    defined = {*definitions.SCALARS, *definitions.PARTS, *definitions.LAYER, *definitions.SCRATCH, *definitions.PACKED}
    assert names == defined


def test_the_document_names_everything():
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    for name in (*KEYS, *MASKS, *definitions.PARTS, "plan", "tables", "partial", *export.SUFFIXES, *KNOWN):
        assert f"`{name}`" in text or f" {name} " in text or f"`{name} " in text or f" {name}`" in text, name
