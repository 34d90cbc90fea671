"""A conformance kit for attention over trees: cases that find faults, an error budget, memory that notices.

>>> import numpy as np
>>> from treeattn.testing import assert_within_budget, make_case
>>> case = make_case(np.random.default_rng(0), mask="tree&(window|sink)")
>>> out, lse = case.yardsticks[0]  # in place of a kernel's result
>>> assert_within_budget(out, lse, case)

`strategies` needs Hypothesis and is imported by name.
"""

from .budget import assert_within_budget
from .cases import Case, alone, gather_path, make_case, pack, repack
from .guard import Canaries, canaries, guarded, guarded_case, poison
from .kinds import Batch, mask_kinds, random_forest, random_lengths, random_trees, shuffled

__all__ = [
    "Batch",
    "Canaries",
    "Case",
    "alone",
    "assert_within_budget",
    "canaries",
    "gather_path",
    "guarded",
    "guarded_case",
    "make_case",
    "mask_kinds",
    "pack",
    "poison",
    "random_forest",
    "random_lengths",
    "random_trees",
    "repack",
    "shuffled",
]
