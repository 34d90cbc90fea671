"""Case files: the arrays of one attention call, in ``.npz`` or ``.safetensors``.

==========================================  ==============================================================
key                                         meaning
==========================================  ==============================================================
``q``, ``q_indptr``                         queries ``[q_total, q_heads, d_qk]`` and their offsets
``k``, ``v``, ``kv_indptr``                 ragged keys and values (see `RaggedKV`), or
``pages``, ``page_indptr``, ``page_ids``,   paged ones (see `PagedKV`)
``last_page_len``
``tree_parents``, ``tree_indptr``           optional: trees one after another, parents local to each
``causal``                                  optional: 1 for a causal mask; a tree needs none
``window``, ``sink``                        optional: positions ``> p - window``, and the first ``sink``
``sm_scale``                                optional: ``1 / sqrt(d_qk)`` by default
``expected_out``, ``expected_lse``          optional: what ``treeattn run --check`` compares with
``bfloat16``                                optional: 1 says that ``uint16`` floats are bfloat16 bits
==========================================  ==============================================================

The mask is ``Tree`` where there are trees, else ``Causal`` or ``Full``; then ``& (Window | Sink)`` where
there is a window. NumPy has no bfloat16: its files hold the bits as ``uint16`` beside ``bfloat16=1``, or as
the two-byte void that ``numpy.savez`` makes of an ``ml_dtypes.bfloat16`` array. Other keys are ignored, and
named in `Case.ignored`.

A file is foreign data: nothing is unpickled, no size is believed before it is checked, and every fault is one
`CaseFileError` (or the error of the argument at fault) that fits on a line.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .arrays import IntArray, check_dtype, indices, numpy_dtype
from .errors import TreeAttnError
from .files import optional, replacing
from .masks import Batch, Causal, Full, Mask, Sink, Tree, Window
from .storage import PagedKV, RaggedKV, check_indptr
from .tree import TokenTree

Arrays = dict[str, NDArray[Any]]

RAGGED_KEYS = ("k", "v", "kv_indptr")
PAGED_KEYS = ("pages", "page_indptr", "page_ids", "last_page_len")
FLOAT_KEYS = ("q", "k", "v", "pages", "expected_out", "expected_lse")
OPTIONAL_KEYS = ("tree_parents", "tree_indptr", "causal", "window", "sink", "sm_scale", "bfloat16")
KEYS = frozenset(("q", "q_indptr", *RAGGED_KEYS, *PAGED_KEYS, *FLOAT_KEYS, *OPTIONAL_KEYS))
MAX_NDIM = 5


class CaseFileError(TreeAttnError, ValueError):
    """A case file that cannot be read, or lacks a key."""


@dataclass(frozen=True, eq=False)
class Case:
    """One attention call, checked: `load_case` makes it."""

    q: NDArray[Any]
    q_indptr: IntArray
    kv: RaggedKV | PagedKV
    mask: Mask
    sm_scale: float | None
    expected_out: NDArray[Any] | None
    expected_lse: NDArray[Any] | None
    ignored: tuple[str, ...]


def load_case(path: str | os.PathLike[str]) -> Case:
    """Read a case file.

    Raises
    ------
    CaseFileError
        Not a readable ``.npz`` or ``.safetensors`` file, or a key that is missing.
    TreeAttnError
        Arrays that contradict each other; the message names the key.
    OSError
        No such file, or no permission.
    """
    path = Path(path)
    arrays = _reader(path)(path)
    floats = {name: _as_float(name, arrays[name], arrays) for name in FLOAT_KEYS if name in arrays}
    fields = _Fields(arrays | floats)
    q = fields.array("q", 3)
    q_indptr = indices(fields["q_indptr"], "q_indptr")
    check_indptr(q_indptr, len(q), "q_indptr", "q")
    kv, mask = _storage(fields), _mask(fields)
    _check_sizes(q, q_indptr, kv, mask)
    expected = q.shape[:2]
    return Case(
        q=q,
        q_indptr=q_indptr,
        kv=kv,
        mask=mask,
        sm_scale=fields.number("sm_scale"),
        expected_out=fields.shaped("expected_out", (*expected, kv.pools.d_v)),
        expected_lse=fields.shaped("expected_lse", expected),
        ignored=tuple(sorted(set(arrays) - KEYS)),
    )


def save_output(path: str | os.PathLike[str], out: NDArray[Any], lse: NDArray[Any]) -> None:
    """Write ``out`` and ``lse`` so that the file is either whole or as it was before."""
    path = Path(path)
    if path.suffix == ".safetensors":
        data: bytes = _safetensors("safetensors.numpy").save(
            {"out": np.ascontiguousarray(out), "lse": np.ascontiguousarray(lse)}
        )
    elif path.suffix == ".npz":
        buffer = io.BytesIO()
        if out.dtype.name == "bfloat16":
            np.savez(buffer, out=out.view(np.uint16), lse=lse, bfloat16=np.int8(1))
        else:
            np.savez(buffer, out=out, lse=lse)
        data = buffer.getvalue()
    else:
        raise _unknown_suffix(path)
    with replacing(path) as temporary:
        temporary.write_bytes(data)


class _Fields(Mapping[str, NDArray[Any]]):
    """The file's arrays; a key that is not there is a `CaseFileError` which says so."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def __getitem__(self, key: str) -> NDArray[Any]:
        if key not in self._arrays:
            raise CaseFileError(f"{key}: expected in the case file, which has {', '.join(sorted(self)) or 'no arrays'}")
        return self._arrays[key]

    def __contains__(self, key: object) -> bool:
        return key in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def get(self, key: str, default: Any = None) -> Any:
        return self._arrays.get(key, default)

    def array(self, key: str, ndim: int) -> NDArray[Any]:
        array = self[key]
        if array.ndim != ndim:
            raise CaseFileError(f"{key}: expected {ndim} dimensions, got shape {array.shape}")
        return array

    def shaped(self, key: str, shape: tuple[int, ...]) -> NDArray[Any] | None:
        array: NDArray[Any] | None = self.get(key)
        if array is not None and array.shape != shape:
            raise CaseFileError(f"{key}: expected shape {shape}, got {array.shape}")
        return array

    def number(self, key: str) -> float | None:
        if key not in self:
            return None
        value = self[key]
        if value.size != 1 or value.dtype.kind not in "biuf" or not np.isfinite(value).all():
            raise CaseFileError(f"{key}: expected one finite number, got {value.dtype} of shape {value.shape}")
        return float(value.reshape(()))

    def integer(self, key: str) -> int | None:
        number = self.number(key)
        if number is not None and not number.is_integer():
            raise CaseFileError(f"{key}: expected an integer, got {number}")
        return None if number is None else int(number)


def _storage(fields: _Fields) -> RaggedKV | PagedKV:
    if ("k" in fields) == ("pages" in fields):
        wanted = f"either {', '.join(RAGGED_KEYS)} or {', '.join(PAGED_KEYS)}"
        raise CaseFileError(f"expected {wanted}, got {', '.join(sorted(fields))}")
    kv = (
        RaggedKV(*map(fields.__getitem__, RAGGED_KEYS))
        if "k" in fields
        else PagedKV(*map(fields.__getitem__, PAGED_KEYS))
    )
    kv.validate()
    return kv


def _check_sizes(q: NDArray[Any], q_indptr: IntArray, kv: RaggedKV | PagedKV, mask: Mask) -> None:
    if len(q_indptr) != kv.num_seqs + 1:
        raise CaseFileError(
            f"q_indptr: expected [{kv.num_seqs + 1}] for {kv.num_seqs} sequences, got [{len(q_indptr)}]"
        )
    if q.shape[1] % kv.kv_heads or q.shape[1] == 0 or q.shape[2] != kv.pools.d_qk:
        wanted = f"a multiple of {kv.kv_heads} heads of {kv.pools.d_qk}"
        raise CaseFileError(f"q: expected {wanted}, got shape {q.shape}")
    mask.check(Batch(q_indptr, kv.kv_len, mask.trees))


def _mask(fields: _Fields) -> Mask:
    mask: Mask = Causal() if fields.integer("causal") else Full()
    if "tree_parents" in fields or "tree_indptr" in fields:
        mask = Tree(_trees(fields["tree_parents"], fields["tree_indptr"]))
    window, sink = fields.integer("window"), fields.integer("sink")
    if window is not None:
        return mask & (Window(window) if sink is None else Window(window) | Sink(sink))
    if sink:
        raise CaseFileError(f"sink: expected a window beside it, got sink {sink} alone; add window, or leave sink out")
    return mask


def _trees(parents: NDArray[Any], indptr: NDArray[Any]) -> list[TokenTree]:
    flat, offsets = indices(parents, "tree_parents"), indices(indptr, "tree_indptr")
    check_indptr(offsets, len(flat), "tree_indptr", "tree_parents")
    trees = []
    for seq, (begin, end) in enumerate(pairwise(offsets.tolist())):
        try:
            trees.append(TokenTree.from_parents(flat[begin:end]))
        except TreeAttnError as error:
            raise type(error)(f"tree_parents of sequence {seq}: {error}") from None
    return trees


def _as_float(name: str, array: NDArray[Any], arrays: Arrays) -> NDArray[Any]:
    flag = arrays.get("bfloat16")
    is_bits = array.dtype == np.uint16 and flag is not None and bool(np.any(flag))
    if is_bits or array.dtype == np.dtype("V2"):
        return array.view(numpy_dtype("bfloat16"))
    if name.startswith("expected_") and array.dtype == np.float64:
        return array
    check_dtype(array.dtype.name, name)
    return array


def _reader(path: Path) -> Callable[[Path], Arrays]:
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise _unknown_suffix(path)
    return readers[path.suffix]


def _unknown_suffix(path: Path) -> CaseFileError:
    return CaseFileError(f"{path}: expected a name that ends in .npz or .safetensors")


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Turn whatever a decoder raises over damaged bytes into one `CaseFileError`."""
    try:
        yield
    except (TreeAttnError, OSError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise CaseFileError(f"{path}: damaged or not a {path.suffix} file ({reason})") from None


def _read_npz(path: Path) -> Arrays:
    with _decoding(path), zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if member.filename.removesuffix(".npy") in KEYS]
        _check_memory(path, sum(member.file_size for member in members))
        arrays = {member.filename.removesuffix(".npy"): _read_member(archive, member) for member in members}
        others = {name.removesuffix(".npy"): np.empty(0) for name in archive.namelist()}
    return others | arrays


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as stream:
        _check_header(stream, member)
    with archive.open(member) as stream:
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        stream.read()  # to the end, where zipfile compares the checksum
    return array


def _check_header(stream: IO[bytes], member: zipfile.ZipInfo) -> None:
    """Compare the size the array claims with the size the archive claims, before either is allocated."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise CaseFileError(f"{member.filename}: expected numbers, got pickled objects, which are never loaded")
    size = stream.tell() + _num_bytes(shape, dtype)
    if len(shape) > MAX_NDIM or size != member.file_size:
        raise ValueError(f"{member.filename} claims shape {shape} {dtype} in {member.file_size} bytes")


def _num_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= max(length, 0)
    return size


def _check_memory(path: Path, size: int) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
    if size > memory:
        raise CaseFileError(f"{path}: expected arrays that fit this machine's {memory >> 20} MiB, got {size >> 20} MiB")


def _read_safetensors(path: Path) -> Arrays:
    decode = _safetensors("safetensors").deserialize
    dtypes: dict[str, Any] = {"F32": "f4", "F16": "f2", "BF16": numpy_dtype("bfloat16"), "F64": "f8", "BOOL": "?"}
    dtypes |= {f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)}
    with _decoding(path):
        data = path.read_bytes()
        tensors = [(name, tensor) for name, tensor in decode(data) if tensor["dtype"] in dtypes or name in KEYS]
        return {
            name: np.frombuffer(tensor["data"], dtypes[tensor["dtype"]]).reshape(tensor["shape"])
            for name, tensor in tensors
        }


def _safetensors(module: str) -> Any:
    return optional(module, ".safetensors files", "safetensors")
