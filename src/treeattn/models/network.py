"""The forward pass of llama, qwen2 and gemma3: attention and cache by treeattn, matrix products by `linear`.

One pass serves prefill, decoding and trees of a batch alike: rows are tokens, whatever sequence they belong to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import IndexRangeError
from ..rope import Rope, turn_pairs
from ..tree import TokenTree
from .checkpoint import ModelFileError, Weights, load_checkpoint
from .config import ModelConfig
from .linear import Float32Array, Linear, Weight, library
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..cache.manager import PagedKVCache

Step = Any
"""A step of `treeattn.PagedKVCache`: what ``begin`` returns."""
PAGE_SIZE = 64
"""Tokens a page of a model's cache: a head's keys of a page lie together, and runs of 4 KB read a quarter slower."""
Angles = dict[Rope | None, tuple[Float32Array, Float32Array]]


class Model:
    """A model ready to run.

    Attributes
    ----------
    config : ModelConfig
        Sizes and constants.
    vocab_size : int
        Number of logits.
    seconds : dict of str to float
        Time spent in ``"attention"`` (appending included), ``"products"`` and all of ``"forward"``, since it was made.
    """

    def __init__(self, config: ModelConfig, weights: Weights, linear: str = "treeattn") -> None:
        self.config, self.seconds = config, {"attention": 0.0, "products": 0.0, "forward": 0.0}
        self._warm: set[str] = set()
        take = _Taker(weights, library(linear))
        embedding = take.array("token_embd.weight", None, config.hidden_size)
        self.vocab_size, is_tied = len(embedding), "output.weight" not in weights
        self._output = take.linear(config.hidden_size, {"token_embd" if is_tied else "output": self.vocab_size})
        self._embedding: Float32Array | None = None if is_tied else embedding
        self._output_norm = take.array("output_norm.weight", config.hidden_size)
        self._layers = [_Layer(config, layer, take) for layer in range(config.attention.num_layers)]

    def new_cache(self, num_pages: int, page_size: int = PAGE_SIZE, dtype: str = "float32") -> PagedKVCache:
        """Return an empty cache of ``num_pages`` pages for this model's layers."""
        from ..cache.manager import PagedKVCache

        spec = self.config.attention
        return PagedKVCache(
            num_layers=spec.num_layers, kv_heads=spec.kv_heads, head_dim=spec.d_qk, num_pages=num_pages,
            page_size=page_size, dtype=dtype,
        )  # fmt: skip

    def warm_up(self, cache_dtype: str = "float32") -> None:
        """Compile the kernels that decoding and trees need, so that no step is timed with a compilation in it."""
        if cache_dtype in self._warm:
            return
        cache = self.new_cache(1, dtype=cache_dtype)
        seq = cache.add()
        for new in (2, TokenTree.star(3)):
            step = cache.begin({seq: new})
            self.forward(step, np.zeros(len(step.positions), np.int32))
            cache.truncate(seq, 0)
        self._warm.add(cache_dtype)
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def forward(self, step: Step, tokens: NDArray[np.int32], rows: Any = None) -> Float32Array:
        """Run the tokens of a step and append their keys and values to the cache.

        Parameters
        ----------
        step : step of a `PagedKVCache`
            What ``cache.begin`` returned for these tokens.
        tokens : int32 ``[n]``
            Tokens of the step's sequences, one after the other; a tree's in node order.
        rows : ints, optional
            Rows whose logits are wanted; all by default.

        Returns
        -------
        logits : float32 ``[len(rows), vocab_size]``
            What follows each of them.

        Raises
        ------
        IndexRangeError
            A token outside the vocabulary.
        """
        start = time.perf_counter()
        x = self.embed(tokens)
        angles = {rope: _angles(rope, step.positions, self.config.attention.d_qk) for rope in self._ropes()}
        with np.errstate(over="ignore"):  # exp of a large negative gate
            for layer in self._layers:
                layer.run(x, step, angles, self._timed)
        x = x if rows is None else x[np.asarray(rows, np.intp)]
        logits: Float32Array = self._timed(
            "products", self._output, rms_norm(x, self._output_norm, self.config.rms_eps)
        )
        self.seconds["forward"] += time.perf_counter() - start
        return logits

    def embed(self, tokens: NDArray[np.int32]) -> Float32Array:
        """Return the embeddings of tokens, float32 ``[n, hidden_size]``."""
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            at = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
            raise IndexRangeError(f"tokens: expected ints in [0, {self.vocab_size}), got {tokens[at]} at index {at}")
        rows = self._output.weight.rows(tokens) if self._embedding is None else self._embedding[tokens]
        scaled: Float32Array = rows * np.float32(self.config.embedding_scale)
        return scaled

    def _ropes(self) -> set[Rope | None]:
        return set(self.config.attention.rope)

    def _timed(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **options)
        self.seconds[name] += time.perf_counter() - start
        return result


class _Taker:
    """Weights by name, of the shape that the configuration says."""

    def __init__(self, weights: Weights, pack: Callable[[Float32Array], Weight]) -> None:
        self._weights, self._pack = weights, pack

    def array(self, name: str, *shape: int | None) -> Float32Array:
        """Return a weight, of any size where ``shape`` has None."""
        if name not in self._weights:
            raise ModelFileError(f"{name}: expected in the model file, which lacks it; is the download complete?")
        array = self._weights[name]
        sizes = zip(array.shape, shape, strict=False)
        if array.ndim != len(shape) or any(wanted not in (None, got) for got, wanted in sizes):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ModelFileError(
                f"{name}: expected shape [{wanted}] by the configuration, got {list(array.shape)}; "
                "are both of one model?"
            )
        return array

    def maybe(self, name: str, size: int) -> Float32Array | None:
        return self.array(name, size) if name in self._weights else None

    def linear(self, inputs: int, outputs: dict[str, int]) -> Linear:
        """Return one product that gives so many outputs of each name, one after the other."""
        weight = np.concatenate([self.array(f"{name}.weight", size, inputs) for name, size in outputs.items()])
        biases = [self.maybe(f"{name}.bias", size) for name, size in outputs.items()]
        if all(bias is None for bias in biases):
            return Linear(self._pack(weight), None)
        parts = zip(biases, outputs.values(), strict=True)
        filled = [np.zeros(size, np.float32) if bias is None else bias for bias, size in parts]
        return Linear(self._pack(weight), np.concatenate(filled))


class _Layer:
    def __init__(self, config: ModelConfig, index: int, take: _Taker) -> None:
        self._config, self._index, name = config, index, f"blk.{index}."
        spec, hidden = config.attention, config.hidden_size
        q, kv = spec.q_heads * spec.d_qk, spec.kv_heads * spec.d_qk
        inner = len(take.array(name + "ffn_gate.weight", None, hidden))
        self._qkv = take.linear(hidden, {name + "attn_q": q, name + "attn_k": kv, name + "attn_v": kv})
        self._attn_output = take.linear(q, {name + "attn_output": hidden})
        self._gate_up = take.linear(hidden, {name + "ffn_gate": inner, name + "ffn_up": inner})
        self._down = take.linear(inner, {name + "ffn_down": hidden})
        self._attn_norm, self._ffn_norm = (take.array(f"{name}{part}_norm.weight", hidden) for part in ("attn", "ffn"))
        self._q_norm, self._k_norm = (take.maybe(f"{name}attn_{part}_norm.weight", spec.d_qk) for part in "qk")
        self._after_attn, self._after_ffn = (
            take.maybe(f"{name}{part}_norm.weight", hidden) for part in ("post_attention", "post_ffw")
        )
        self._rope = spec.rope[index]
        self._attend = {"window": spec.windows[index], "sm_scale": spec.sm_scale, "softcap": spec.softcap}

    def run(self, x: Float32Array, step: Step, angles: Angles, timed: Callable[..., Any]) -> None:
        """Add this layer's attention and feed-forward network to ``x``, in place."""
        norm = partial(rms_norm, eps=self._config.rms_eps)
        q, k, v = self._heads(timed("products", self._qkv, norm(x, self._attn_norm)))
        if self._q_norm is not None and self._k_norm is not None:
            q, k = norm(q, self._q_norm), norm(k, self._k_norm)
        if self._rope is not None:
            pairs = self._rope.pairs(q.shape[-1])
            for part in (q, k):
                turn_pairs(part, *angles[self._rope], pairs)
        timed("attention", step.append, self._index, k, v)
        out, _ = timed("attention", step.attention, self._index, q, **self._attend)
        y = timed("products", self._attn_output, out.reshape(len(x), -1))
        x += y if self._after_attn is None else norm(y, self._after_attn)
        both = timed("products", self._gate_up, norm(x, self._ffn_norm))
        half = both.shape[1] // 2
        gated = ACTIVATE[self._config.activation](both[:, :half])
        gated *= both[:, half:]
        y = timed("products", self._down, gated)
        x += y if self._after_ffn is None else norm(y, self._after_ffn)

    def _heads(self, qkv: Float32Array) -> tuple[Float32Array, Float32Array, Float32Array]:
        spec = self._config.attention
        heads = qkv.reshape(len(qkv), -1, spec.d_qk)
        q_end, k_end = spec.q_heads, spec.q_heads + spec.kv_heads
        return heads[:, :q_end], heads[:, q_end:k_end], heads[:, k_end:]


def rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    mean_square = np.einsum("...d,...d->...", x, x) / np.float32(x.shape[-1])
    normed: Float32Array = x / np.sqrt(mean_square + np.float32(eps))[..., None]
    normed *= weight
    return normed


def silu(x: Float32Array) -> Float32Array:
    """``x / (1 + exp(-x))``."""
    gated: Float32Array = np.exp(-x)
    gated += 1
    np.divide(x, gated, out=gated)
    return gated


def gelu_tanh(x: Float32Array) -> Float32Array:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    gated: Float32Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return gated


ACTIVATE: dict[str, Callable[[Float32Array], Float32Array]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def _angles(rope: Rope | None, positions: NDArray[np.int32], d: int) -> tuple[Float32Array, Float32Array]:
    if rope is None:
        empty = np.zeros((0, 1, 0), np.float32)
        return empty, empty
    cos, sin = rope.cos_sin(positions, d)
    return cos[:, None], sin[:, None]


def load_model(path: str | Path, linear: str = "treeattn") -> tuple[Model, Tokenizer | None]:
    """Read a model and its tokenizer from a ``.gguf`` file or a folder of safetensors.

    Parameters
    ----------
    path : path
        As in `load_checkpoint`.
    linear : str
        What multiplies: "treeattn", "numpy" or "torch".

    Raises
    ------
    ModelFileError, UnsupportedError
        As in `load_checkpoint`; or a weight is missing.
    """
    checkpoint = load_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    return Model(config, checkpoint.weights, linear), checkpoint.tokenizer
