"""The exported CPU library, called without TVM: by plans of this package, bit for bit, and by plans made from the
manifest's definitions alone, against the oracle."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_case import example_case, example_result
from helpers import assert_same, attend, plan_of, rng

import treeattn as ta
from treeattn.ahead.compiled import compile_spec
from treeattn.ahead.describe import read_spec
from treeattn.ahead.export import export
from treeattn.testing import assert_within_budget, make_case

pytestmark = pytest.mark.skipif(
    next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None) is None, reason="there is no C compiler"
)
SPEC = {"d_qk": 16, "q_dtype": "float32", "mask": "tree & (window | sink)"}
MASK = "tree&(window|sink)"
ROPE = ta.Rope(theta=500.0, style="gptj", rotary_dim=8)
PARTS = {
    "d_qk": 16,
    "q_dtype": "float32",
    "mask": "causal",
    "rope": {"style": "gptj", "rotary_dim": 8},
} | dict.fromkeys(("softcap", "alibi", "sink_logits"), True)
CTYPES = {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}


class Library:
    """An export, loaded by ctypes."""

    def __init__(self, folder):
        self.folder, self.manifest = folder, json.loads((folder / "manifest.json").read_text())
        (self.kernel,) = self.manifest["kernels"]
        function = self.kernel["functions"]["attention"]
        self.arguments = function["arguments"]

        class Arguments(ctypes.Structure):
            _fields_ = tuple(
                (a["name"], ctypes.c_void_p if a["kind"] == "buffer" else CTYPES[a["dtype"]]) for a in self.arguments
            )

        self.struct = Arguments
        self.library = ctypes.CDLL(str(folder / self.manifest["c"]["library"]))
        self.entry = getattr(self.library, function["entry"])

    def run(self, case, plan, threads):
        """Call with the arrays and scalars of a plan by name, in memory laid out by the manifest."""
        q, pages, tile = case.q, case.kv.pages, self.kernel["tile"]
        out, lse = np.full((*q.shape[:2], 16), np.nan, "float32"), np.full(q.shape[:2], np.nan, "float32")
        floats = np.full(threads * self.kernel["workspace_floats"] + 16, np.nan, "float32")
        arrays = plan["arrays"] | {
            "q": q, "k": pages[:, 0], "v": pages[:, 1], "out": out, "lse": lse,
            "workspace": floats[-floats.ctypes.data % 64 // 4 :],
            "row_bounds": np.zeros(threads * len(self.kernel["leaves"]) * max(tile["rows"], 8), np.int32),
        }  # fmt: skip
        page, _, head, slot, _ = (step // 4 for step in pages.strides)
        heads, cap = q.shape[1], case.parts.get("softcap", 1.0) * np.log2(np.e)
        scalars = plan["scalars"] | {
            "threads": threads, "page_size": pages.shape[3], "group": heads // pages.shape[2], "lse_token": heads,
            "sm_scale": 16**-0.5, "cap_limit": cap, "cap_inverse": 1 / cap,
            **{f"{x}_token": heads * 16 for x in ("q", "out")}, **{f"{x}_head": 16 for x in ("q", "out")},
            **{f"{x}_page": page for x in "kv"}, **{f"{x}_slot": slot for x in "kv"},
            **{f"{x}_head": head for x in "kv"},
        }  # fmt: skip
        values = {name: array.ctypes.data for name, array in arrays.items()} | scalars
        optional = {"rope_low", "rope_high", "alibi", "sink_logits", "positions"}  # read only with their parts
        assert {a["name"] for a in self.arguments} - optional <= set(values)
        assert self.entry(ctypes.byref(self.struct(**values))) == 0
        return out, lse


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(ta.compile(SPEC).export(tmp_path_factory.mktemp("library")).parent)


LENGTHS = [(1, 90), (3, 90), (7, 40), (60, 130), (0, 4), (2, 2), (30, 300)]


def cases():
    for seed in range(3):
        yield make_case(rng(seed), mask=MASK, dtype="float32", d_qk=16, lengths=LENGTHS, q_heads=2 + 2 * seed)


def own_plan(library, case, threads):
    """What the package hands to its own kernel, with the kinds of the library's tiles."""
    launch = plan_of(case, threads=threads)._launch
    work = launch.work
    names = ("items", "item_indptr", "seqs", "spans", "bounds", "nodes")
    arrays = {name: getattr(work, name) for name in names} | {"page_ids": case.kv.table.page_ids}
    arrays["items"] = work.items.copy()
    arrays["items"][:, 0] = np.searchsorted(library.kernel["tile"]["few"], work.items[:, 4])
    return {"arrays": arrays, "scalars": {"bounds_stride": work.bounds.shape[1]}}


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_those_of_the_package(library, threads):
    for case in cases():
        assert_same(library.run(case, own_plan(library, case, threads), threads), attend(case, threads=threads))


def defined_plan(library, case, threads):
    """A plan by the definitions of the manifest, in loops: one span for all columns, items in turns to threads."""
    tile, kv = library.kernel["tile"], case.kv
    sizes = [getattr(leaf, "size", None) for leaf in case.mask.leaves()]
    group, q_total = case.q.shape[1] // kv.pages.shape[2], len(case.q)
    stride = q_total + 8
    seqs, spans, nodes, items = [], [], [], [[] for _ in range(threads)]
    bounds, positions = np.zeros((len(sizes), stride), np.int32), np.zeros(q_total, np.int32)
    for b in range(case.num_seqs):
        q_begin, q_len = int(case.q_indptr[b]), int(case.q_indptr[b + 1] - case.q_indptr[b])
        num_pages = int(kv.page_indptr[b + 1] - kv.page_indptr[b])
        kv_len = (num_pages - 1) * kv.pages.shape[3] + int(kv.last_page_len[b]) if num_pages else 0
        own = walk(case.mask.trees[b].parents) if case.mask.trees else []
        prefix_len = kv_len - len(own)
        seqs.append([q_begin, kv.page_indptr[b], prefix_len, len(nodes), 0, 0, 0, 0])
        for i in range(q_len):
            enter, _, depth = own[len(own) - q_len + i] if own else (0, 0, 0)
            position = prefix_len + depth if own else kv_len - q_len + i
            for k, size in enumerate(sizes):
                leaf = library.kernel["leaves"][k]["mask"]
                known = {"tree": enter, "causal": kv_len - q_len + i + 1, "sink": size}
                bounds[k, q_begin + i] = position - size + 1 if leaf == "window" else known[leaf]
            positions[q_begin + i] = position
        nodes += own
        for head in range(kv.pages.shape[2]):
            for begin in range(0, q_len * group, tile["rows"]):
                rows = min(tile["rows"], q_len * group - begin)
                kind = sum(few < rows for few in tile["few"])
                item = [kind, b, head, begin, rows, len(spans), len(spans) + 1]
                items[(head + begin) % threads].append(item)
        spans.append([0, kv_len, 0])
    counts = [len(own) for own in items]
    arrays = {
        "items": [item for own in items for item in own], "item_indptr": np.cumsum([0, *counts]), "seqs": seqs,
        "spans": [*spans, [0, 0, 0]], "page_ids": kv.page_ids, "bounds": bounds, "nodes": nodes,
        "positions": positions,
    }  # fmt: skip
    arrays = {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}
    return {"arrays": arrays | defined_tables(case), "scalars": {"bounds_stride": stride}}


def defined_tables(case):
    """The float arrays of a plan, by the definitions of the manifest."""
    tables = {name: np.asarray(case.parts[name], np.float32) for name in ("alibi", "sink_logits") if name in case.parts}
    if rope := case.parts.get("rope"):
        inv_freq = rope.theta ** (-np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
        for name, step, rows in (("rope_low", 1, 1024), ("rope_high", 1024, 2)):
            angles = step * np.arange(rows)[:, None] * inv_freq
            tables[name] = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return tables


def walk(parents):
    """(enter, exit, depth) of every node, by a depth-first walk."""
    found, count = [None] * len(parents), 0

    def visit(node, depth):
        nonlocal count
        enter, count = count, count + 1
        for child, parent in enumerate(parents):
            if parent == node:
                visit(child, depth + 1)
        found[node] = [enter, count, depth]

    for root, parent in enumerate(parents):
        if parent < 0:
            visit(root, 0)
    return found


@pytest.mark.parametrize("threads", [1, 4])
def test_definitions_of_the_manifest_are_enough(library, threads):
    for case in cases():
        assert_within_budget(*library.run(case, defined_plan(library, case, threads), threads), case)


def test_definitions_of_every_part_are_enough(tmp_path):
    """Rotation past the first 1024 positions, a cap, slopes and sinks."""
    library = Library(ta.compile(PARTS).export(tmp_path / "parts").parent)
    case = make_case(
        rng(), mask="causal", d_qk=16, lengths=[(1, 1100), (5, 9), (40, 61), (0, 3)], q_heads=6, logit_scale=20.0
    )
    parts = {"rope": ROPE, "softcap": 9.0, "alibi": 2.0 ** -np.arange(6), "sink_logits": np.linspace(-2, 2, 6)}
    case = replace(case, parts=parts)
    assert_within_budget(*library.run(case, defined_plan(library, case, 2), 2), case)


def test_a_wrong_plan_is_noticed(library):
    """Bounds of another tree give another result: the comparison above can fail."""
    case = next(cases())
    plan = defined_plan(library, case, 1)
    plan["arrays"]["bounds"][0] = 0
    with pytest.raises(AssertionError):
        assert_within_budget(*library.run(case, plan, 1), case)


def test_needs_nothing_of_tvm_or_python(library):
    """A process without either loads it."""
    code = f"import ctypes; ctypes.CDLL({str(library.folder / 'libtreeattn.so')!r}).treeattn_attention"
    clean = [sys.executable, "-I", "-S", "-c", code]
    assert subprocess.run(clean, capture_output=True, check=False).returncode == 0
    if ldd := shutil.which("ldd"):
        listed = subprocess.run(
            [ldd, str(library.folder / "libtreeattn.so")], capture_output=True, text=True, check=True
        )
        assert "tvm" not in listed.stdout
        assert "python" not in listed.stdout


def test_a_call_is_attention(monkeypatch):
    """The compiled kernel takes the arguments of `treeattn.attention`; building it again would only take time."""
    from treeattn.ahead import compiled

    monkeypatch.setattr(compiled, "build", lambda *_: None)
    case = next(cases())
    kernel = ta.compile(SPEC)
    assert_same(kernel(case.q, case.kv, case.mask, **case.options), attend(case))
    with pytest.raises(ta.UnsupportedError, match="kernel: expected a call of"):
        kernel(case.q.astype("float16"), case.kv, case.mask, **case.options)
    with pytest.raises(ta.ShapeError):
        kernel(case.q[0], case.kv, case.mask)


# --- examples ------------------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_c_example(tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(EXAMPLES / "export_c", folder, ignore=shutil.ignore_patterns("export", "main"))
    ta.compile(json.loads((folder / "spec.json").read_text())).export(folder / "export")
    built = subprocess.run(
        ["make", "-C", folder, "main", "TREEATTN=false"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "warning" not in built.stderr
    done = subprocess.run([folder / "main", folder / "out"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_within_budget(*example_result(folder / "out"), example_case())


def test_kernels_of_one_library_and_other_machines(tmp_path):
    """Kernels by name in one library; for another processor, an object alone."""
    specs = [{"d_qk": 8, "q_dtype": dtype, "mask": "full"} for dtype in ("float16", "bfloat16")]
    kernels = [
        compile_spec(read_spec(spec), "llvm", name=name) for spec, name in zip(specs, ("one", "two"), strict=True)
    ]
    folder = export(kernels, tmp_path / "here").parent
    library = ctypes.CDLL(str(folder / "libtreeattn.so"))
    assert library.treeattn_one
    assert library.treeattn_two
    header = (folder / "treeattn.h").read_text()
    assert "#define TREEATTN_TWO_ROWS" in header
    assert "const void *q; /* float16 or bfloat16" in header
    foreign = ta.compile(specs[0], "llvm-neon").export(tmp_path / "there").parent
    assert {path.name for path in foreign.iterdir()} == {
        "attention.ll", "attention.o", "manifest.json", "treeattn.c", "treeattn.h",
    }  # fmt: skip
    assert (foreign / "attention.o").read_bytes()[18:20] == b"\xb7\x00"  # AArch64 in an ELF header
