"""A paged KV cache: sequences of tokens over shared pages, forked, grown by trees, truncated, saved."""
