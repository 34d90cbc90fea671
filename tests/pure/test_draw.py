"""Trees from JSON, and pictures: read back what was written."""

import builtins
import json
import os
from pathlib import Path

import numpy as np
import pytest

from treeattn.draw import draw_png, load_tree
from treeattn.errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError
from treeattn.tree import TokenTree

SHARED = Path(os.environ.get("TREEATTN_SHARED", Path(__file__).parents[3] / "shared"))
TREES = SHARED / "data" / "trees.json"
BINARY = TokenTree.from_parents([-1, 0, 0])


@pytest.mark.parametrize(
    ("content", "trees"),
    [
        ([-1, 0, 0], {"small": BINARY}),
        ({"parents": [-1, 0, 0]}, {"small": BINARY}),
        ({"choices": [[0], [1]], "note": "ranks"}, {"small": BINARY}),
        ({"paths": [[0], [1]]}, {"small": BINARY}),
        (
            {"a": [-1], "b": {"paths": [[0], [1]]}, "paths": {"parents": [-1, 0]}, "_source": {"not": "a tree"}},
            {"a": TokenTree.chain(1), "b": BINARY, "paths": TokenTree.chain(2)},
        ),
        ([], {"small": TokenTree.chain(0)}),
        ({}, {}),
    ],
)
def test_every_form_by_file_and_by_object(tmp_path, content, trees):
    file = tmp_path / "small.json"
    file.write_text(json.dumps(content))
    assert load_tree(file) == trees
    assert load_tree(str(file)) == trees
    assert load_tree(content) == {("tree" if name == "small" else name): tree for name, tree in trees.items()}


BAD = [
    ("{", ShapeError, r"expected JSON, got Expecting property name .* line 1 column 2 .*; see load_tree"),
    ("", ShapeError, r"expected JSON, got Expecting value"),
    ("[" * 100_000, ShapeError, r"expected JSON, got "),
    ("3", DTypeError, r"expected a list of parents or an object, got 3; write \{\"parents\": \[-1, 0, 0\]\}$"),
    ('{"a": "b"}', DTypeError, r"'a': expected a list of parents or an object, got 'b'; "),
    ('{"a": {}}', ShapeError, r"'a': expected one of the keys parents, choices, paths, got none; give each"),
    ('{"parents": [-1], "choices": []}', ShapeError, r"expected one of .*, got parents and choices; "),
    ('{"a": {"parents": 3}}', DTypeError, r"'a': parents: expected a list, got 3; write \[\.\.\.\] there$"),
    ('{"a": {"paths": "01"}}', DTypeError, r"'a': paths: expected a list, got '01'; "),
    ('{"a": {"parents": [-1, 7]}}', IndexRangeError, r"'a': parents: expected int in \[-1, 2\), got 7 at node 1; "),
    ('{"a": [1, 0]}', ShapeError, r"'a': parents: expected a forest, got the cycle "),
    ("[NaN]", DTypeError, r"parents: expected ints, got float64; "),
    ("[[0], [1]]", ShapeError, r"parents: expected shape \[n\], got \[2, 1\]; "),
    ('{"a": {"choices": [[1, 0]]}}', ShapeError, r"'a': choices\[0\]: expected its parent \[1\] in choices"),
]


@pytest.mark.parametrize(("text", "error", "message"), BAD, ids=[text[:20] for text, _, _ in BAD])
def test_errors_name_the_file_and_the_key(tmp_path, text, error, message):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(error, match=message) as caught:
        load_tree(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_a_file_of_other_bytes(tmp_path):
    file = tmp_path / "bad.json"
    file.write_bytes(b"\x89PNG\xff")
    with pytest.raises(ShapeError, match=r"bad\.json: expected JSON, got "):
        load_tree(file)


def test_a_missing_file():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        load_tree("nowhere.json")


@pytest.mark.skipif(not TREES.exists(), reason=f"no {TREES}; set TREEATTN_SHARED to the shared folder")
def test_trees_of_published_systems():
    trees = load_tree(TREES)
    entries = json.loads(TREES.read_text())
    assert trees.keys() == {name for name in entries if not name.startswith("_")}
    assert {name: tree.num_nodes for name, tree in trees.items()} == {
        name: entries[name]["n_with_root"] for name in trees
    }


# pictures -----------------------------------------------------------------------------------------


def picture(path):
    image = pytest.importorskip("matplotlib.image")
    return image.imread(path)[..., :3]


@pytest.mark.parametrize("parents", [[], [-1], [-1, -1, 0, 1, 1], [2, 2, -1], list(range(-1, 199))])
def test_png(tmp_path, parents):
    pytest.importorskip("matplotlib")
    file = tmp_path / "tree.png"
    draw_png(TokenTree.from_parents(parents), file)
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree.png"]
    assert picture(file).std() > 0.01  # something is drawn


def test_the_mask_is_on_the_right_and_true_to_the_tree(tmp_path):
    """The share of dark pixels in the right half goes with the share of visible pairs."""
    pytest.importorskip("matplotlib")
    dark = []
    for tree in (TokenTree.star(8), TokenTree.chain(8)):
        draw_png(tree, tmp_path / "tree.png")
        image = picture(tmp_path / "tree.png")
        right = image[:, image.shape[1] // 2 :]
        dark.append(np.all(np.abs(right - np.array([8, 48, 107]) / 255) < 0.02, axis=-1).sum())
    assert dark[1] / dark[0] == pytest.approx(36 / 15, rel=0.05)


def test_an_existing_file_is_replaced_and_kept_when_writing_fails(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    file = tmp_path / "tree.png"
    file.write_bytes(b"old")

    def full_disk(self, content):
        with self.open("wb") as file:
            file.write(content[:20])
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        with pytest.raises(OSError, match="no space left"):
            draw_png(BINARY, file)
    assert file.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree.png"]
    draw_png(BINARY, str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree.png"]


def test_a_rename_that_fails_leaves_nothing_behind(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "tree.png").mkdir()
    with pytest.raises(OSError, match=r"tree\.png"):
        draw_png(BINARY, tmp_path / "tree.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree.png"]


def test_too_many_nodes(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UnsupportedError, match=r"^draw_png: expected at most 4096 nodes, got 4097; draw a part"):
        draw_png(TokenTree.star(4097), tmp_path / "tree.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r'pip install "treeattn\[plot\]"'):
        draw_png(BINARY, tmp_path / "tree.png")
    assert not list(tmp_path.iterdir())
