"""``treeattn show``: a tree and its mask, as text and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..tree import TokenTree

MAX_MASK = 100  # nodes; a wider mask does not fit a terminal


@click.command("show", short_help="Draw a tree and its mask.")
@click.argument("file", metavar="TREE.json", type=click.Path(path_type=Path))
@click.option("--png", type=click.Path(path_type=Path), help="Draw into this PNG file too (needs matplotlib).")
@click.option("--name", help="Which tree, where the file holds several; the others are listed.")
def command(file: Path, png: Path | None, name: str | None) -> None:
    """Draw the tree of a JSON file, and the mask it means (row sees column).

    The file holds a list of parents, {"parents": [...]}, {"choices": [[0], [0, 1], ...]} as Medusa has them,
    or a mapping of names to these.
    """
    from ..draw import draw_png, load_tree

    trees = load_tree(file)
    tree = _pick(trees, name, file)
    counts = f"{tree.num_nodes} nodes, {len(tree.leaves())} leaves, {_levels(tree)} levels"
    click.echo(f"{_name_of(trees, tree)}: {counts}")
    click.echo(tree.render())
    if 0 < tree.num_nodes <= MAX_MASK:
        click.echo()
        click.echo("\n".join("".join("█" if seen else "·" for seen in row) for row in tree.mask()))
    if png is not None:
        draw_png(tree, png)
        click.echo(f"drawn into {png}")


def _pick(trees: dict[str, TokenTree], name: str | None, file: Path) -> TokenTree:
    from ..errors import ShapeError

    if not trees:
        raise ShapeError(f"{file}: expected at least one tree, got none")
    if name is None and len(trees) > 1:
        click.echo(f"{file} has {', '.join(trees)}; choose with --name", err=True)
    if name is not None and name not in trees:
        raise click.BadParameter(f"{file} has no {name!r}; it has {', '.join(trees)}")
    return trees[name or next(iter(trees))]


def _name_of(trees: dict[str, TokenTree], tree: TokenTree) -> str:
    return next(name for name, candidate in trees.items() if candidate is tree)


def _levels(tree: TokenTree) -> int:
    return int(tree.depth.max(initial=-1)) + 1
