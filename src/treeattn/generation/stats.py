"""What a generator did, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..speculate.budget import Proposal
from ..speculate.verify import Accepted

PARTS = ("attention", "products", "forward", "drafting")


@dataclass
class Stats:
    """Counts and times since a generator was made; steps that run a part of a prompt are kept apart.

    Attributes
    ----------
    steps, tokens, decode_seconds
        Steps that only decode, the tokens they gave, and their time.
    prompt_tokens, prompt_seconds
        Of the steps with a part of a prompt.
    drafted, accepted : list of int
        Draft tokens by depth, the root's children first.
    seconds : dict of str to float
        Time by part; ``"forward"`` contains attention and products.
    """

    steps: int = 0
    tokens: int = 0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def step(self, seconds: float, tokens: int, prompt_tokens: int) -> None:
        """Count a step."""
        if prompt_tokens:
            self.prompt_tokens += prompt_tokens
            self.prompt_seconds += seconds
        else:
            self.steps += 1
            self.tokens += tokens
            self.decode_seconds += seconds

    def verified(self, draft: Proposal, accepted: Accepted) -> None:
        """Count a tree and what came of it."""
        depth = draft.tree.depth.tolist()
        for counts, nodes in ((self.drafted, range(1, len(depth))), (self.accepted, accepted.nodes[1:])):
            for node in nodes:
                counts.extend([0] * (depth[node] - len(counts)))
                counts[depth[node] - 1] += 1

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens a second, prompts not counted."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens a decoding step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Part of the draft tokens that was accepted, by depth."""
        accepted = self.accepted + [0] * (len(self.drafted) - len(self.accepted))
        return [hits / count if count else 0.0 for hits, count in zip(accepted, self.drafted, strict=True)]

    def record(self) -> dict[str, Any]:
        """Return all of it as plain numbers."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_step": self.tokens_per_step,
            "prompt_tokens": self.prompt_tokens,
            "prompt_seconds": self.prompt_seconds,
            "decode_seconds": self.decode_seconds,
            "acceptance_by_depth": self.acceptance,
            "drafted_by_depth": self.drafted,
            "seconds": self.seconds,
        }
