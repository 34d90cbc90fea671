"""Compiled kernels on disk: found again, rebuilt when damaged, shared by processes, optional."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from treeattn import compiler, store

PROGRAM = """
import importlib.util, json, sys
import numpy as np
import treeattn as ta
k = np.linspace(-1, 1, 5 * 4, dtype=np.float32).reshape(5, 1, 4)
out, lse = ta.attention(k[:2].copy(), ta.RaggedKV(k, k, [0, 5]), ta.Full())
import treeattn.compiler as compiler
print(json.dumps({"out": out.tobytes().hex(), "compiled": compiler.compilations, "tvm": "tvm" in sys.modules}))
assert "tvm" in sys.modules or "torch" not in sys.modules, "a kernel from disk brought torch in"
if importlib.util.find_spec("torch"):
    import torch
    q, keys = torch.from_numpy(k[:2].copy()), torch.from_numpy(k)
    again, _ = ta.attention(q, ta.RaggedKV(keys, keys, [0, 5]), ta.Full())
    assert again.numpy().tobytes() == out.tobytes()
"""


def start(folder, **environment):
    settings = {"TREEATTN_CACHE_DIR": str(folder)} | environment
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    return subprocess.Popen(
        command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    printed, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    assert complaints == ""
    return json.loads(printed)


def run(folder, **environment):
    return finish(start(folder, **environment))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache folder with one kernel, and what the program that made it printed."""
    folder = tmp_path_factory.mktemp("kernels")
    return folder, run(folder)


@pytest.fixture
def copy(filled, tmp_path):
    for path in filled[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def entries(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_second_process_compiles_nothing_and_loads_no_compiler(filled):
    folder, first = filled
    assert first["compiled"] == 1
    before = entries(folder)
    assert run(folder) == {"out": first["out"], "compiled": 0, "tvm": False}
    assert entries(folder) == before
    assert {Path(name).suffix for name in before} == {".so", ".sha256"}


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a bit flipped": flip_a_bit,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("suffix", [".so", ".sha256"])
@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_entries_are_not_loaded(copy, monkeypatch, how, suffix):
    monkeypatch.setenv("TREEATTN_CACHE_DIR", str(copy))
    (library,) = copy.glob("*.so")
    assert store.load(library.stem, ".so") == library
    DAMAGE[how](library.with_suffix(suffix))
    assert store.load(library.stem, ".so") is None


def test_a_sound_entry_that_is_no_library_is_rebuilt(copy, filled):
    """Its digest is right, the loader refuses it."""
    import hashlib

    for path in copy.glob("*.so"):
        path.write_bytes(b"no library")
        path.with_suffix(".sha256").write_bytes(hashlib.sha256(b"no library").digest())
    assert run(copy) == {"out": filled[1]["out"], "compiled": 1, "tvm": True}
    assert run(copy)["compiled"] == 0


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    """A file stands where it should be: not even the superuser can write into that."""
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("TREEATTN_CACHE_DIR", str(tmp_path / "file"))
    assert store.save("name", ".so", b"12345") is None
    assert store.load("name", ".so") is None
    assert store.size() == 0
    assert (tmp_path / "file").read_text() == "mine"


def test_two_processes_at_once(filled, tmp_path):
    both = [start(tmp_path / "new") for _ in range(2)]
    assert [finish(process)["out"] for process in both] == [filled[1]["out"]] * 2
    assert set(entries(tmp_path / "new")) == set(entries(filled[0])), "no half-written files stay"
    assert run(tmp_path / "new")["compiled"] == 0


class Module:
    def write_to_file(self, path, kind):
        Path(path).write_bytes(b"not an object")


@pytest.mark.parametrize("linker", [None, "exit 1"])
def test_no_linker_or_a_broken_one(monkeypatch, tmp_path, linker):
    """The kernel then lives in memory."""
    if linker:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{linker}\n")
        (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler._link(Module()) is None


def test_without_a_linker_and_a_folder(filled):
    assert run("/dev/null/kernels", PATH="/nowhere") == {"out": filled[1]["out"], "compiled": 1, "tvm": True}


def test_a_kernel_from_disk_needs_no_linker(copy, filled):
    assert run(copy, PATH="/nowhere") == {"out": filled[1]["out"], "compiled": 0, "tvm": False}


def test_the_key_covers_parts_versions_and_source(monkeypatch):
    keys = {store.key("spec", 1), store.key("spec", 2), store.key("other", 1)}
    assert store.key("spec", 1) in keys
    monkeypatch.setattr(store, "versions", lambda: "apache-tvm 0.28")
    keys.add(store.key("spec", 1))
    monkeypatch.setattr(store, "source_fingerprint", lambda: "edited")
    keys.add(store.key("spec", 1))
    assert len(keys) == 5


def test_versions_and_source_are_real():
    assert "apache-tvm 0." in store.versions()
    assert "apache-tvm-ffi 0." in store.versions()
    assert len(store.source_fingerprint()) == 64


def test_where_kernels_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("TREEATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.folder() == tmp_path / "treeattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.folder() == tmp_path / ".cache" / "treeattn"
    monkeypatch.setenv("TREEATTN_CACHE_DIR", "~/mine")
    assert store.folder() == tmp_path / "mine"


def test_size(monkeypatch, tmp_path):
    monkeypatch.setenv("TREEATTN_CACHE_DIR", str(tmp_path / "kernels"))
    assert store.size() == 0
    assert store.save("name", ".so", b"12345") == tmp_path / "kernels" / "name.so"
    assert store.size() == 5 + store.DIGEST_BYTES
    assert store.load("name", ".so").read_bytes() == b"12345"
    store.discard(store.load("name", ".so"))
    assert store.load("name", ".so") is None
    assert store.size() == 0
