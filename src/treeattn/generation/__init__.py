"""Generation: requests that share a model and a cache, joined and left between steps, with drafts verified as trees."""

from __future__ import annotations

from .generator import Generator as Generator
from .generator import Request as Request
from .sampling import Sampling as Sampling
from .stats import Stats as Stats
