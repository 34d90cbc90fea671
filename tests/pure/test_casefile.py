"""Case files: what they mean, and that damaged ones are refused in one line."""

from __future__ import annotations

import errno
import io
import os
import zipfile

import ml_dtypes
import numpy as np
import pytest

from treeattn.casefile import CaseFileError, load_case, save_output
from treeattn.errors import DTypeError, IndexRangeError, TreeAttnError
from treeattn.files import replacing
from treeattn.masks import Causal, Full, Tree
from treeattn.reference import visible
from treeattn.storage import PagedKV, RaggedKV

safetensors_numpy = pytest.importorskip("safetensors.numpy")


def ragged(**changes):
    rng = np.random.default_rng(0)
    arrays = {
        "q": rng.standard_normal((5, 4, 8), np.float32),
        "q_indptr": np.array([0, 3, 5]),
        "k": rng.standard_normal((12, 2, 8), np.float32),
        "v": rng.standard_normal((12, 2, 6), np.float32),
        "kv_indptr": np.array([0, 7, 12]),
    } | changes
    return {name: value for name, value in arrays.items() if value is not None}


def treed(parents=(-1, 0, 0, -1, 0), indptr=(0, 3, 5), **changes):
    return ragged(tree_parents=np.array(parents), tree_indptr=np.array(indptr), **changes)


def paged(**changes):
    rng = np.random.default_rng(1)
    arrays = {
        "q": rng.standard_normal((5, 4, 8), np.float32),
        "q_indptr": np.array([0, 3, 5], np.int64),
        "pages": rng.standard_normal((6, 2, 2, 3, 8), np.float32),
        "page_indptr": np.array([0, 3, 5], np.uint8),
        "page_ids": np.array([4, 0, 2, 5, 1]),
        "last_page_len": np.array([1, 2], np.int16),
    } | changes
    return {name: value for name, value in arrays.items() if value is not None}


def write(path, arrays):
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        safetensors_numpy.save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, path)
    return path


@pytest.fixture(params=[".npz", ".safetensors"])
def path(request, tmp_path):
    return tmp_path / f"case{request.param}"


def test_ragged_case(path):
    arrays = treed()
    case = load_case(write(path, arrays))
    assert isinstance(case.kv, RaggedKV)
    assert isinstance(case.mask, Tree)
    assert [tree.parents.tolist() for tree in case.mask.trees] == [[-1, 0, 0], [-1, 0]]
    np.testing.assert_array_equal(case.q, arrays["q"])
    np.testing.assert_array_equal(case.kv.v, arrays["v"])
    assert case.kv.kv_len.tolist() == [7, 5]
    assert case.sm_scale is None
    assert case.expected_out is None
    assert case.ignored == ()


def test_paged_case(path):
    case = load_case(write(path, paged(causal=np.array(True), sm_scale=np.float64(0.25))))
    assert isinstance(case.kv, PagedKV)
    assert isinstance(case.mask, Causal)
    assert case.kv.kv_len.tolist() == [7, 5]
    assert case.sm_scale == 0.25


@pytest.mark.parametrize("causal", [None, 0, False])
def test_mask_is_full_by_default(tmp_path, causal):
    case = load_case(write(tmp_path / "case.npz", ragged(causal=causal)))
    assert isinstance(case.mask, Full)


def test_window_and_sink_join_the_base(tmp_path):
    case = load_case(write(tmp_path / "case.npz", ragged(causal=1, window=2, sink=np.array([1]))))
    assert visible(case.mask, 1, 2, 5).astype(int).tolist() == [[1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]
    case = load_case(write(tmp_path / "case.npz", ragged(causal=1, window=2)))
    assert visible(case.mask, 1, 2, 5).astype(int).tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_a_tree_stands_above_causal(tmp_path):
    arrays = treed((1, -1, 1, -1, 0), causal=1)
    case = load_case(write(tmp_path / "case.npz", arrays))
    assert visible(case.mask, 0, 3, 7)[0].astype(int).tolist() == [1, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("spelling", ["void", "uint16", "safetensors"])
def test_bfloat16(tmp_path, spelling):
    arrays = paged()
    halves = {name: arrays[name].astype(ml_dtypes.bfloat16) for name in ("q", "pages")}
    if spelling == "uint16":
        arrays |= {name: half.view(np.uint16) for name, half in halves.items()} | {"bfloat16": 1}
    else:
        arrays |= halves
    name = "case.safetensors" if spelling == "safetensors" else "case.npz"
    case = load_case(write(tmp_path / name, arrays))
    assert case.q.dtype == case.kv.dtype == "bfloat16"
    np.testing.assert_array_equal(case.q, halves["q"])
    np.testing.assert_array_equal(case.kv.pages, halves["pages"])


def test_other_keys_are_named_and_not_even_decoded(tmp_path):
    objects = np.array([{}], object)
    case = load_case(write(tmp_path / "case.npz", ragged(comment=objects, windw=3)))
    assert case.ignored == ("comment", "windw")


def test_expected_results_are_kept(path):
    out, lse = np.zeros((5, 4, 6)), np.zeros((5, 4), np.float32)
    case = load_case(write(path, ragged(expected_out=out, expected_lse=lse)))
    assert case.expected_out.shape == out.shape
    assert case.expected_lse.dtype == np.float32


BAD = {
    "no q": (ragged(q=None), CaseFileError, "q: expected in the case file"),
    "no k": (ragged(k=None), CaseFileError, "expected either k, v, kv_indptr or pages"),
    "no v": (ragged(v=None), CaseFileError, "v: expected in the case file"),
    "both storages": (ragged() | paged(), CaseFileError, "expected either"),
    "no tree_indptr": (ragged(tree_parents=np.array([-1])), CaseFileError, "tree_indptr: expected"),
    "one tree too few": (treed((-1, 0, 0, 1, 0), (0, 5)), TreeAttnError, "one per sequence"),
    "float64": (ragged(q=np.zeros((5, 4, 8))), DTypeError, "float64 is not offered"),
    "integers": (ragged(q=np.zeros((5, 4, 8), np.int32)), DTypeError, "q: expected dtype"),
    "uint16 without a word": (paged(pages=np.zeros((6, 2, 2, 3, 8), np.uint16)), DTypeError, "uint16"),
    "complex": (ragged(k=np.zeros((12, 2, 8), np.complex64)), DTypeError, "complex64"),
    "flat q": (ragged(q=np.zeros(5, np.float32)), CaseFileError, "q: expected 3 dimensions"),
    "float indptr": (ragged(q_indptr=np.array([0.0, 3, 5])), DTypeError, "q_indptr: expected integers"),
    "indptr too short": (ragged(q_indptr=np.array([0, 3])), IndexRangeError, "q_indptr: expected to end at 5"),
    "indptr of other batch": (ragged(q_indptr=np.array([0, 3, 4, 5])), CaseFileError, "for 2 sequences"),
    "falling indptr": (ragged(kv_indptr=np.array([0, 13, 12])), IndexRangeError, "never fall"),
    "page id": (paged(page_ids=np.array([4, 0, 2, 6, 1])), IndexRangeError, r"page_ids: .* got 6 at index 3"),
    "last page": (paged(last_page_len=np.array([4, 2])), IndexRangeError, "last_page_len"),
    "no pages": (paged(pages=np.zeros((6, 2, 2, 0, 8), np.float32)), TreeAttnError, "pages"),
    "cycle": (treed((-1, 0, 0, 1, 0)), TreeAttnError, "tree_parents of sequence 1"),
    "parent": (treed((-1, 0, 3, -1, 0)), IndexRangeError, "sequence 0"),
    "window 0": (ragged(window=0), IndexRangeError, "Window"),
    "window of two": (ragged(window=np.array([1, 2])), CaseFileError, "window: expected one finite number"),
    "window of 1.5": (ragged(window=1.5), CaseFileError, "window: expected an integer"),
    "window of nan": (ragged(window=np.nan), CaseFileError, "window"),
    "window of text": (ragged(window="a"), CaseFileError, "window"),
    "huge window": (ragged(window=2.0**200), IndexRangeError, "Window"),
    "sink alone": (ragged(sink=4), CaseFileError, "sink: expected a window"),
    "infinite scale": (ragged(sm_scale=np.inf), CaseFileError, "sm_scale"),
    "heads": (ragged(q=np.zeros((5, 3, 8), np.float32)), CaseFileError, "multiple of 2 heads"),
    "head size": (ragged(q=np.zeros((5, 4, 7), np.float32)), CaseFileError, "heads of 8"),
    "expected_out": (ragged(expected_out=np.zeros((5, 4, 8))), CaseFileError, "expected_out: expected shape"),
    "expected_lse": (ragged(expected_lse=np.zeros((4, 5))), CaseFileError, "expected_lse: expected shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_refused(tmp_path, name):
    arrays, error, text = BAD[name]
    with pytest.raises(error, match=text) as caught:
        load_case(write(tmp_path / "case.npz", arrays))
    assert "\n" not in str(caught.value)


def test_pickled_objects_are_refused(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "loaded"),)

    file = write(tmp_path / "case.npz", ragged(q=np.array([Bomb()], object)))
    with pytest.raises(CaseFileError, match="pickled objects"):
        load_case(file)
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize("name", ["case.npy", "case", "case.npz.txt"])
def test_other_endings_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CaseFileError, match=r"ends in \.npz or \.safetensors"):
        load_case(tmp_path / name)


def test_missing_file_and_folder(path):
    with pytest.raises(FileNotFoundError):
        load_case(path)
    path.mkdir()
    with pytest.raises((IsADirectoryError, CaseFileError)):
        load_case(path)


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 100, b"{}", b"\x93NUMPY" * 20])
def test_other_contents_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(CaseFileError, match="damaged or not"):
        load_case(path)


def test_truncation_is_refused_at_every_length(path):
    whole = write(path, paged()).read_bytes()
    for length in sorted({*range(0, len(whole), 23), *range(len(whole) - 40, len(whole))}):
        path.write_bytes(whole[:length])
        with pytest.raises(TreeAttnError):
            load_case(path)


def test_flipped_bytes_are_refused_or_harmless(path):
    rng = np.random.default_rng(2)
    whole = write(path, paged()).read_bytes()
    for at in rng.integers(0, len(whole), 400):
        damaged = bytearray(whole)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            load_case(path)
        except (TreeAttnError, OSError) as error:
            assert "\n" not in str(error)


def npz_with(name, header, body):
    """Make an npz whose member ``name`` has this npy header, as a dict, and this body."""
    text = repr(header).encode().ljust(117) + b"\n"
    npy = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", npy)
    return buffer.getvalue()


@pytest.mark.parametrize("shape", [(1 << 40, 4, 8), (1 << 62, 1 << 62, 8), (0, 1 << 62, 8), (-1, 4, 8), (2,) * 7])
def test_a_header_that_claims_too_much_is_not_believed(tmp_path, shape):
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    (tmp_path / "case.npz").write_bytes(npz_with("q", header, b"\0" * 64))
    with pytest.raises(CaseFileError):
        load_case(tmp_path / "case.npz")


def test_an_archive_that_claims_more_than_the_memory_is_refused(tmp_path):
    content = bytearray(npz_with("q", {"descr": "<f4", "fortran_order": False, "shape": (16,)}, b"\0" * 64))
    directory = content.index(b"PK\x01\x02")
    content[directory + 24 : directory + 28] = b"\xff\xff\xff\xfe"  # 4 GiB in each of enough members
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        assert archive.infolist()[0].file_size > 1 << 31
    (tmp_path / "case.npz").write_bytes(content)
    with pytest.raises(CaseFileError):
        load_case(tmp_path / "case.npz")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_output_can_be_read_back(path, dtype):
    out, lse = np.arange(12).reshape(1, 3, 4).astype(dtype), np.ones((1, 3), np.float32)
    save_output(path, out, lse)
    if path.suffix == ".npz":
        with np.load(path) as found:
            read = found["out"].view(dtype) if "bfloat16" in found else found["out"]
            read_lse = found["lse"]
    else:
        from safetensors import deserialize

        found = dict(deserialize(path.read_bytes()))
        read = np.frombuffer(found["out"]["data"], dtype).reshape(found["out"]["shape"])
        read_lse = np.frombuffer(found["lse"]["data"], np.float32).reshape(found["lse"]["shape"])
    np.testing.assert_array_equal(read, out)
    np.testing.assert_array_equal(read_lse, lse)


def test_output_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "out.npz"
    save_output(target, np.zeros((1, 1, 1), np.float32), np.zeros((1, 1), np.float32))
    before = target.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_output(target, np.ones((1, 1, 1), np.float32), np.zeros((1, 1), np.float32))
    assert target.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.npz"]


def test_output_of_another_ending_is_refused(tmp_path):
    with pytest.raises(CaseFileError, match="ends in"):
        save_output(tmp_path / "out.txt", np.zeros((1, 1, 1), np.float32), np.zeros((1, 1), np.float32))


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "x.npz"
    path.write_text("before")
    with pytest.raises(OSError, match=r"No space left on device: .*x\.npz") as caught, replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(path)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("x.npz", "before")]
