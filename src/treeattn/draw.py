"""Trees from JSON files, and pictures of trees."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DTypeError, ShapeError, TreeAttnError, UnsupportedError
from .files import replacing
from .tree import TokenTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

MAX_DRAWN = 4096  # nodes; beyond, the mask takes seconds and a node less than a pixel
SMALLEST_NUMBERED = 8  # points; numbers in smaller dots are not legible
READERS: dict[str, Callable[[Any], TokenTree]] = {
    "parents": TokenTree.from_parents,
    "choices": TokenTree.from_choices,
    "paths": TokenTree.from_choices,
}


def load_tree(source: str | Path | Sequence[Any] | Mapping[str, Any]) -> dict[str, TokenTree]:
    """Trees of a JSON file, or of the object such a file holds, by name.

    Parameters
    ----------
    source
        A file name, or the object: a list of parents; ``{"parents": [...]}``; ``{"choices": [[...], ...]}``
        or ``{"paths": ...}``, both rank paths without the root as in ``TokenTree.from_choices``; or a mapping
        of names to any of these, where names that begin with ``_`` are skipped. Other keys beside these are
        ignored. A tree without a name gets the file's, less its ending, or ``"tree"``.

    Raises
    ------
    OSError
        The file cannot be read.
    ShapeError, DTypeError, IndexRangeError
        No JSON, JSON of another form, or no tree; the message names the file and the key.

    Examples
    --------
    >>> load_tree({"binary": {"choices": [[0], [1]]}, "row": [-1, 0, 1]})["binary"].parents.tolist()
    [-1, 0, 0]
    """
    if not isinstance(source, (str, Path)):
        return dict(_named_trees(source, "tree", "tree"))
    path = Path(source)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{path}: expected JSON, got {error}; see load_tree for the forms of a tree") from None
    return dict(_named_trees(content, path.stem, str(path)))


def _named_trees(content: Any, name: str, where: str) -> Iterator[tuple[str, TokenTree]]:
    if not isinstance(content, Mapping) or any(isinstance(content.get(form), list) for form in READERS):
        yield name, _read_tree(content, where)
        return
    for key, entry in content.items():
        if not str(key).startswith("_"):
            yield key, _read_tree(entry, f"{where}: {key!r}")


def _read_tree(entry: Any, where: str) -> TokenTree:
    """Tree of a list of parents, or of a mapping with one of the keys of READERS."""
    if isinstance(entry, Sequence) and not isinstance(entry, str):
        entry = {"parents": entry}
    if not isinstance(entry, Mapping):
        raise DTypeError(
            f'{where}: expected a list of parents or an object, got {entry!r:.60}; write {{"parents": [-1, 0, 0]}}'
        )
    forms = [form for form in READERS if form in entry]
    if len(forms) != 1:
        raise ShapeError(
            f"{where}: expected one of the keys {', '.join(READERS)}, got {' and '.join(forms) or 'none'}; "
            "give each tree one of them"
        )
    form = forms[0]
    if not isinstance(entry[form], Sequence) or isinstance(entry[form], str):
        raise DTypeError(f"{where}: {form}: expected a list, got {entry[form]!r:.60}; write [...] there")
    try:
        return READERS[form](entry[form])
    except TreeAttnError as error:
        raise type(error)(f"{where}: {error}") from None


def draw_png(tree: TokenTree, path: str | Path) -> None:
    """Draw a tree and, beside it, its mask matrix into a PNG file, which appears whole or not at all.

    Parameters
    ----------
    tree
        At most 4096 nodes.
    path
        File to write; an existing one is replaced.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed, or the tree is too large.
    OSError
        The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(
            'draw_png: expected matplotlib, which is not installed; pip install "treeattn[plot]", or use tree.render()'
        ) from None
    if tree.num_nodes > MAX_DRAWN:
        raise UnsupportedError(
            f"draw_png: expected at most {MAX_DRAWN} nodes, got {tree.num_nodes}; draw a part of the tree"
        )
    figure = Figure(figsize=(16, 7), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(4, 3))
    _draw_nodes(tree, left)
    _draw_mask(tree, right)
    png = io.BytesIO()
    figure.savefig(png, format="png", bbox_inches="tight")
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(png.getvalue())


def _draw_nodes(tree: TokenTree, axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    across, down = _positions(tree), tree.depth
    children = np.flatnonzero(tree.parents >= 0)
    ends = np.stack([tree.parents[children], children], axis=1)
    # One line with NaN for pen lifts: thousands of separate ones take seconds.
    gaps = np.full((len(ends), 1), np.nan)
    line_across, line_down = (np.hstack([place[ends], gaps]).ravel() for place in (across, down))
    axes.plot(line_across, line_down, color="0.6", linewidth=0.8, zorder=1)
    widest, deepest = max(len(tree.leaves()), 1), max(down, default=0) + 1
    dot = min(20.0, 550 / widest, 400 / deepest)  # points; the panel has about 600 x 430
    axes.scatter(across, down, s=dot**2, color="#3b6ea8", linewidths=0, zorder=2)
    for node in range(tree.num_nodes if dot >= SMALLEST_NUMBERED else 0):
        place, size = (across[node], down[node]), 0.45 * dot
        axes.annotate(str(node), place, ha="center", va="center", color="white", fontsize=size)
    axes.invert_yaxis()
    axes.set(title=f"{tree.num_nodes} nodes, {len(tree.leaves())} leaves", ylabel="depth", xticks=[])
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _draw_mask(tree: TokenTree, axes: Axes) -> None:
    if tree.num_nodes:
        axes.imshow(tree.mask(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set(title="row sees column", xlabel="node seen", ylabel="node that sees")


def _positions(tree: TokenTree) -> NDArray[np.float64]:
    """Place across, ``[n]``: leaves side by side depth first, each other node in the middle of its leaves."""
    enter, exit_ = tree.intervals.T
    leaves = np.sort(enter[tree.leaves()])
    first, last = np.searchsorted(leaves, enter), np.searchsorted(leaves, exit_) - 1
    middle: NDArray[np.float64] = (first + last) / 2
    return middle
