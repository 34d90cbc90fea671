"""How big: tile sizes as data, chosen from what is computed and where."""
