"""RoPE on the host against the oracle, formulas of the papers, and values other implementations print."""

import json
import math
import pickle
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from treeattn.errors import DTypeError, IndexRangeError, ShapeError, TreeAttnError, UnsupportedError
from treeattn.reference import rope as oracle
from treeattn.rope import TABLE_LOW, Rope, RopeScaling

HALF = 32
SHORT, LONG = np.linspace(1, 1.5, HALF), np.geomspace(1, 48, HALF)
SCALINGS = {
    "none": None,
    "linear": RopeScaling.linear(8),
    "dynamic": RopeScaling.dynamic(2, 4096),
    "llama3": RopeScaling.llama3(8, 1, 4, 8192),
    "llama4": RopeScaling.llama4(16, 1, 1, 8192),
    "yarn": RopeScaling.yarn(32, 4096),
    "yarn-ends-untruncated": RopeScaling.yarn(32, 4096, truncate=False),
    "yarn-deepseek": RopeScaling.yarn(40, 4096, mscale=0.707, mscale_all_dim=1.0),
    "yarn-given-factor": RopeScaling.yarn(4, 32768, beta_fast=16, beta_slow=2, attention_factor=1.25),
    "longrope": RopeScaling.longrope(SHORT, LONG, 4096, factor=32),
    "longrope-given-factor": RopeScaling.longrope(SHORT, LONG, 4096, attention_factor=1.19),
}
SEQ_LENS = (None, 4000, 1_000_001)
POSITIONS = np.array([0, 1, 7, 1023, 1024, 1025, 4096, 65535, 123_456, 524_288, 999_999, 1_000_000])
RNG = np.random.default_rng(3)

by_scaling = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)


def rope_of(scaling: RopeScaling | None, **fields) -> Rope:
    return Rope(scaling=scaling, **{"theta": 500000.0, **fields})


def true_cos_sin(rope: Rope, positions: np.ndarray, d: int, seq_len: int | None) -> tuple[np.ndarray, np.ndarray]:
    frequencies = [oracle.frequency(rope, pair, d, seq_len or 0) for pair in range(d // 2)]
    angle = positions[:, None].astype(np.float64) * rope.scale * np.array(frequencies)
    size = oracle.amplitude(rope.scaling)
    return size * np.cos(angle), size * np.sin(angle)


# Against the oracle


@by_scaling
@pytest.mark.parametrize("seq_len", SEQ_LENS)
def test_frequencies_equal_the_oracles(scaling, seq_len):
    for theta in (1e4, 5e5, 1e7):
        rope = rope_of(scaling, theta=theta)
        wanted = [oracle.frequency(rope, pair, 2 * HALF, seq_len or 0) for pair in range(HALF)]
        np.testing.assert_allclose(rope.inv_freq(2 * HALF, seq_len), wanted, rtol=2e-14)
        assert rope.attention_factor == pytest.approx(oracle.amplitude(scaling), rel=1e-15)


@by_scaling
@pytest.mark.parametrize("style", ["neox", "gptj"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rotate_equals_the_oracle(scaling, style, dtype):
    for rotary_dim, d, scale in ((None, 2 * HALF, 1.0), (2 * HALF, 96, 0.25)):
        rope = rope_of(scaling, style=style, rotary_dim=rotary_dim, scale=scale)
        x = RNG.standard_normal((len(POSITIONS), 3, d)).astype(dtype)
        for seq_len in SEQ_LENS:
            turned = rope.rotate(x, POSITIONS, seq_len)
            assert turned.dtype == dtype
            wanted = oracle.rotate(x, POSITIONS, rope, seq_len)
            unit = {2: float(ml_dtypes.finfo(dtype).eps) / 2, 4: 0.0}[np.dtype(dtype).itemsize]
            limit = 4e-7 * np.abs(wanted).max() + unit * 1.01 * np.abs(wanted)
            assert (np.abs(turned.astype(np.float64) - wanted) <= limit).all()


@by_scaling
@pytest.mark.parametrize("seq_len", [None, 1_000_001])
def test_two_level_tables_reach_a_million(scaling, seq_len):
    rope, d = rope_of(scaling), 2 * HALF
    table = rope.tables(d, 1_000_000, seq_len)
    assert table.shape == (TABLE_LOW + 1_000_000 // TABLE_LOW + 1, 2, HALF)
    assert table.dtype == np.float32 and table.flags.c_contiguous and not table.flags.writeable
    positions = np.concatenate([POSITIONS, RNG.integers(0, 1_000_001, 20_000)])
    error = table_error(rope, table, positions, d, seq_len)
    assert error <= 3e-7 * max(1.0, rope.attention_factor), error


def test_two_level_tables_at_every_position():
    rope, d = Rope(), 16
    table = rope.tables(d, 1_000_000)
    for chunk in np.array_split(np.arange(1_000_001), 10):
        assert table_error(rope, table, chunk, d, None) <= 3e-7


def table_error(rope: Rope, table: np.ndarray, positions: np.ndarray, d: int, seq_len: int | None) -> float:
    """Largest error of what a kernel computes from the tables, as their docstring says."""
    low, high = table[positions % TABLE_LOW], table[TABLE_LOW + positions // TABLE_LOW]
    cos = low[:, 0] * high[:, 0] - low[:, 1] * high[:, 1]
    sin = low[:, 1] * high[:, 0] + low[:, 0] * high[:, 1]
    assert cos.dtype == np.float32
    true_cos, true_sin = true_cos_sin(rope, positions, d, seq_len)
    return max(np.abs(cos - true_cos).max(), np.abs(sin - true_sin).max())


@by_scaling
def test_cos_sin_is_float64_rounded_once(scaling):
    rope = rope_of(scaling, scale=0.5)
    cos, sin = rope.cos_sin(POSITIONS, 2 * HALF, 5000)
    assert cos.dtype == sin.dtype == np.float32
    for got, wanted in zip((cos, sin), true_cos_sin(rope, POSITIONS, 2 * HALF, 5000), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=6e-8 * max(1.0, rope.attention_factor) + 1e-9)


def test_tables_of_few_positions_and_reuse():
    rope = Rope()
    assert rope.tables(64, 0).shape == (TABLE_LOW + 1, 2, 32)
    assert rope.tables(64, TABLE_LOW).shape == (TABLE_LOW + 2, 2, 32)
    assert rope.tables(64, 5000, seq_len=7) is rope.tables(64, 5100, seq_len=9000)  # neither matters here
    np.testing.assert_array_equal(rope.tables(64, 0)[TABLE_LOW], [np.ones(32), np.zeros(32)])
    longrope = rope_of(SCALINGS["longrope"])
    assert longrope.needs_seq_len and not rope.needs_seq_len
    assert not np.array_equal(longrope.tables(64, 9000, 100), longrope.tables(64, 9000, 9000))


# Properties


@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_scores_depend_on_the_distance_only(style):
    rope = Rope(style=style)
    q, k = RNG.standard_normal((2, 1, 1, 64)).astype(np.float32)
    scores = [float((rope.rotate(q, [start + 9]) * rope.rotate(k, [start])).sum()) for start in (0, 100, 5000)]
    np.testing.assert_allclose(scores, scores[0], atol=2e-5)


def test_styles_differ_by_an_order_of_dimensions():
    x = RNG.standard_normal((5, 2, 10)).astype(np.float32)
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7, 8, 9])  # where gptj has the members of neox's pairs
    neox, gptj = Rope(rotary_dim=8), Rope(rotary_dim=8, style="gptj")
    positions = [3, 0, 99, 7, 12]
    np.testing.assert_array_equal(gptj.rotate(x[..., order], positions), neox.rotate(x, positions)[..., order])


def test_partial_rotary_leaves_the_rest_bit_for_bit():
    x = RNG.standard_normal((4, 2, 128)).astype(np.float16)
    turned = Rope(rotary_dim=96).rotate(x, [1, 2, 3, 4])
    np.testing.assert_array_equal(turned[..., 96:].view(np.uint16), x[..., 96:].view(np.uint16))
    assert (turned[..., :96] != x[..., :96]).mean() > 0.9


def test_position_zero_only_multiplies_by_the_attention_factor():
    x = RNG.standard_normal((1, 1, 64)).astype(np.float32)
    np.testing.assert_array_equal(Rope().rotate(x, [0]), x)
    yarn = rope_of(SCALINGS["yarn"])
    np.testing.assert_array_equal(yarn.rotate(x, [0]), x * np.float32(yarn.attention_factor))


def test_input_is_not_written_and_may_lie_anyhow():
    buffer = RNG.standard_normal((64, 6, 3)).astype(np.float32)
    x = buffer.T[:, ::-2]  # [3, 3, 64], no axis contiguous
    x.setflags(write=False)
    before = x.copy()
    positions = np.array([5, 6, 7], np.uint8)
    np.testing.assert_array_equal(Rope().rotate(x, positions), Rope().rotate(before, [5, 6, 7]))
    np.testing.assert_array_equal(x, before)
    assert Rope().rotate(np.empty((0, 2, 8), np.float32), []).shape == (0, 2, 8)


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 2, 64).to(torch.bfloat16)
    turned = Rope().rotate(x, [0, 5, 900])
    assert isinstance(turned, torch.Tensor) and turned.dtype == torch.bfloat16
    np.testing.assert_allclose(turned.float().numpy(), oracle.rotate(x, [0, 5, 900], Rope()), rtol=0.01, atol=0.02)


def test_is_a_value():
    ropes = {rope_of(scaling) for scaling in SCALINGS.values()}
    assert len(ropes) == len(SCALINGS)
    same = Rope(theta=500000, scaling=RopeScaling.longrope(list(SHORT), list(LONG), 4096, 32))
    assert same in ropes and hash(same) == hash(rope_of(SCALINGS["longrope"]))
    assert pickle.loads(pickle.dumps(same)) == same
    with pytest.raises(AttributeError):
        same.theta = 1.0


# Known values


def test_frequencies_of_the_paper():
    wanted = [10000 ** (-2 * i / 64) for i in range(32)]  # Su et al. 2021, eq. 15
    np.testing.assert_allclose(Rope().inv_freq(64), wanted, rtol=1e-15)
    np.testing.assert_allclose(Rope(rotary_dim=32).inv_freq(80), wanted[::2], rtol=1e-15)
    np.testing.assert_allclose(Rope(scaling=RopeScaling.linear(4)).inv_freq(64), np.array(wanted) / 4, rtol=1e-15)
    cos, sin = Rope().cos_sin([3], 64)
    assert (cos[0, 0], sin[0, 0]) == (np.float32(math.cos(3)), np.float32(math.sin(3)))


def test_llama3_by_metas_three_bands():
    factor, low, high, original = 32, 1, 4, 8192  # Llama 3.2
    got = Rope(5e5, scaling=RopeScaling.llama3(factor, low, high, original)).inv_freq(64)
    bands = set()
    for i in range(32):
        plain = 1 / 5e5 ** (i / 32)
        wavelength = 2 * math.pi / plain
        if wavelength < original / high:
            band, wanted = "kept", plain
        elif wavelength > original / low:
            band, wanted = "divided", plain / factor
        else:
            smooth = (original / wavelength - low) / (high - low)
            band, wanted = "blended", (1 - smooth) * plain / factor + smooth * plain
        bands.add(band)
        assert got[i] == pytest.approx(wanted, rel=1e-13)
    assert len(bands) == 3


def test_llama_with_equal_factors_is_a_step():
    got = Rope(5e5, scaling=RopeScaling.llama3(16, 1, 1, 8192)).inv_freq(128)  # Llama-4-Scout says llama3
    plain = Rope(5e5).inv_freq(128)
    divided = 2 * np.pi / plain > 8192
    np.testing.assert_allclose(got, np.where(divided, plain / 16, plain), rtol=1e-15)
    assert 0 < divided.sum() < 64


def test_dynamic_ntk_grows_with_the_sequence():
    rope = Rope(scaling=RopeScaling.dynamic(4, 2048))
    for seq_len in (None, 1, 2048):
        np.testing.assert_allclose(rope.inv_freq(128, seq_len), Rope().inv_freq(128), rtol=1e-15)
    base = 10000 * (4 * 8192 / 2048 - 3) ** (128 / 126)
    np.testing.assert_allclose(rope.inv_freq(128, 8192), [base ** (-i / 64) for i in range(64)], rtol=1e-13)
    assert rope.inv_freq(2, 8192).tolist() == [1.0]


def test_yarn_equals_what_transformers_prints():
    # Printed by transformers 5.5 (Qwen3RotaryEmbedding, float32) for a Qwen drafter: public test vectors.
    rope = Rope(1e7, scaling=RopeScaling.yarn(32, 8192))
    printed = {0: 1.0, 16: 0.01548585, 24: 0.0008398615, 32: 0.000009882118, 63: 0.0000000040199906}
    got = rope.inv_freq(128)
    assert [got[i] for i in printed] == pytest.approx(list(printed.values()), rel=3e-7)
    assert rope.attention_factor == pytest.approx(1.3465736, abs=1e-7)


def test_yarn_of_gpt_oss():
    got = Rope(150000.0, scaling=RopeScaling.yarn(32, 4096, truncate=False)).inv_freq(64)
    first, last = (32 * math.log(4096 / (turns * 2 * math.pi)) / math.log(150000) for turns in (32, 1))
    assert (first, last) == pytest.approx((8.0928, 17.3980), abs=1e-3)
    for i in range(32):
        plain = 150000 ** (-i / 32)
        ramp = min(max((i - first) / (last - first), 0), 1)
        assert got[i] == pytest.approx(plain / 32 * ramp + plain * (1 - ramp), rel=1e-13)


@pytest.mark.parametrize(
    ("theta", "dim", "scaling", "ramp"),
    [
        (1e4, 64, RopeScaling.yarn(8, 128), [min(i / 11, 1) for i in range(32)]),  # begins before the first pair
        (10.0, 8, RopeScaling.yarn(8, 10**6, beta_fast=1e5), [0, 1 / 7, 2 / 7, 3 / 7]),  # ends at dim - 1 at most
        (1e4, 8, RopeScaling.yarn(8, 4), [0, 1, 1, 1]),  # begins where it ends
    ],
)
def test_yarn_ramps_that_reach_past_the_pairs(theta, dim, scaling, ramp):
    plain = Rope(theta).inv_freq(dim)
    wanted = plain * (1 - np.array(ramp)) + plain / 8 * np.array(ramp)
    np.testing.assert_allclose(Rope(theta, scaling=scaling).inv_freq(dim), wanted, rtol=1e-13)


def test_attention_factors():
    def factor(scaling: RopeScaling) -> float:
        return Rope(scaling=scaling).attention_factor

    assert factor(RopeScaling.yarn(40, 4096, mscale=1, mscale_all_dim=1)) == 1  # DeepSeek-V3
    assert factor(RopeScaling.yarn(40, 4096, mscale=0.707)) == pytest.approx(0.1 * math.log(40) + 1)
    assert factor(RopeScaling.yarn(40, 4096, mscale=1, mscale_all_dim=0)) == pytest.approx(0.1 * math.log(40) + 1)
    assert factor(RopeScaling.yarn(0.5, 4096)) == 1
    assert factor(RopeScaling.longrope(SHORT, LONG, 4096, factor=32)) == pytest.approx(1.1902380714)  # Phi-4-mini
    assert factor(RopeScaling.longrope(SHORT, LONG, 4096)) == 1
    assert factor(RopeScaling.linear(4)) == 1 and Rope().attention_factor == 1


def test_longrope_picks_its_factors_by_length():
    rope = Rope(scaling=SCALINGS["longrope"])
    for seq_len, factors in ((None, SHORT), (4096, SHORT), (4097, LONG)):
        np.testing.assert_allclose(rope.inv_freq(64, seq_len), Rope().inv_freq(64) / factors, rtol=1e-14)


# Errors


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Rope(theta=0), ShapeError, "theta: expected a number above 0, got 0"),
        (lambda: Rope(theta="1e4"), DTypeError, "theta: expected a number, got '1e4'"),
        (lambda: Rope(theta=math.nan), ShapeError, "theta: expected a finite number, got nan"),
        (lambda: Rope(theta=1.0, scaling=RopeScaling.yarn(2, 4096)), ShapeError, "theta: expected above 1 for yarn"),
        (lambda: Rope(scale=-1.0), ShapeError, "scale: expected a number above 0"),
        (lambda: Rope(style="llama"), UnsupportedError, "style: expected one of neox, gptj, got 'llama'"),
        (lambda: Rope(rotary_dim=7), ShapeError, "rotary_dim: expected an even number above 0, got 7"),
        (lambda: Rope(rotary_dim=0.5), DTypeError, "rotary_dim: expected an integer, got 0.5"),
        (lambda: Rope(scaling={"type": "yarn"}), DTypeError, "scaling: expected RopeScaling or None, got dict"),
        (lambda: Rope().inv_freq(63), ShapeError, "d: expected an even number above 0, got 63"),
        (lambda: Rope(rotary_dim=64).tables(32, 5), ShapeError, "d: expected at least rotary_dim 64, got 32"),
        (lambda: Rope().tables(64, -1), IndexRangeError, "max_position: expected 0 or more, got -1"),
        (lambda: Rope().cos_sin([3, -1], 64), IndexRangeError, "positions: expected 0 or more, got -1 at index 1"),
        (lambda: Rope().cos_sin([0.5], 64), DTypeError, "positions: expected integers"),
        (lambda: Rope().rotate(np.zeros((2, 64)), [0, 1]), DTypeError, "x: float64 is not offered"),
        (lambda: Rope().rotate(np.zeros((2, 64), "f4"), [0, 1]), ShapeError, "x: expected shape"),
        (lambda: Rope().rotate(np.zeros((2, 1, 64), "f4"), [0]), ShapeError, "positions: expected shape [2]"),
        (lambda: RopeScaling("ntk"), UnsupportedError, "kind: expected one of linear, dynamic, llama3"),
        (lambda: RopeScaling.linear(0), ShapeError, "factor: expected a number above 0"),
        (lambda: RopeScaling.yarn(4, 0), ShapeError, "original_max_position: expected 2 tokens or more, got 0"),
        (lambda: RopeScaling.llama3(8, 4, 1, 8192), ShapeError, "low_freq_factor: expected at most"),
        (lambda: RopeScaling.longrope([1, 0], [1, 1], 4096), ShapeError, "short_factor[1]: expected a number above 0"),
        (lambda: RopeScaling.longrope(2, [1], 4096), DTypeError, "short_factor: expected a list of numbers, got 2"),
        (lambda: rope_of(SCALINGS["longrope"]).inv_freq(128), ShapeError, "short_factor: expected 64 numbers"),
    ],
)
def test_errors_say_what_was_wanted(make, error, says):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value).startswith(says)
    assert isinstance(caught.value, TreeAttnError)


# Configurations of Hugging Face

LLAMA = {"model_type": "llama", "head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (LLAMA, Rope(5e5)),
        ({"model_type": "llama", "head_dim": 64}, Rope()),  # Llama 1 and 2 say nothing
        ({**LLAMA, "rope_scaling": None}, Rope(5e5)),
        ({**LLAMA, "rope_scaling": {"rope_type": "default"}}, Rope(5e5)),
        (
            {**LLAMA, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}},
            Rope(5e5, scaling=RopeScaling.llama3(32, 1, 4, 8192)),
        ),
        (
            {"model_type": "llama", "rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 5e5}},
            Rope(5e5, scaling=RopeScaling.llama3(32, 1, 4, 8192)),
        ),
        (
            {**LLAMA, "rope_scaling": {**LLAMA3, "rope_type": "llama4"}},
            Rope(5e5, scaling=RopeScaling.llama4(32, 1, 4, 8192)),
        ),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}, Rope(5e5, scaling=RopeScaling.linear(2))),
        (
            {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2}},
            Rope(5e5, scaling=RopeScaling.dynamic(2, 131072)),
        ),
        ({**LLAMA, "rope_scaling": {**YARN, "type": "yarn"}}, Rope(5e5, scaling=RopeScaling.yarn(4, 32768))),
        (
            {
                **LLAMA,
                "rope_scaling": {"original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
            },
            Rope(5e5, scaling=RopeScaling.yarn(32, 4096, truncate=False)),  # the factor is the ratio of the contexts
        ),
        ({**LLAMA, "partial_rotary_factor": 0.5}, Rope(5e5, rotary_dim=32)),
        ({**LLAMA, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, Rope(1e4, rotary_dim=16)),
        (
            {
                "model_type": "gpt_neox",
                "hidden_size": 512,
                "num_attention_heads": 8,
                "rotary_pct": 0.25,
                "rotary_emb_base": 1e4,
            },
            Rope(rotary_dim=16),
        ),
        ({"model_type": "gptj", "rotary_dim": 64}, Rope(rotary_dim=64, style="gptj")),
        ({"model_type": "glm", "head_dim": 128, "partial_rotary_factor": 0.5}, Rope(rotary_dim=64, style="gptj")),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, Rope(style="gptj")),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "rope_interleave": False}, Rope()),
        (
            {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "rope_theta": 5e5}},
            Rope(5e5, style="gptj"),
        ),
    ],
)
def test_from_hf_config(config, wanted, tmp_path):
    assert Rope.from_hf_config(config) == wanted
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Rope.from_hf_config(tmp_path) == Rope.from_hf_config(str(tmp_path / "config.json")) == wanted


def test_longrope_of_phi_in_each_spelling():
    phi = {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072}
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    wanted = Rope(scaling=RopeScaling.longrope([1.0] * 48, [2.0] * 48, 4096, factor=32))
    for name in ("longrope", "su", "yarn"):
        config = {**phi, "original_max_position_embeddings": 4096, "rope_scaling": {**factors, "type": name}}
        assert Rope.from_hf_config(config) == wanted
    inside = {**factors, "rope_type": "longrope", "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    assert Rope.from_hf_config({**phi, "rope_parameters": inside}) == wanted


def test_gemma3_layers_differ_in_each_spelling():
    full = Rope(1e6, scaling=RopeScaling.linear(8))
    linear = {"factor": 8.0, "rope_type": "linear"}
    old = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "rope_scaling": linear}}
    nested = {
        "full_attention": {**linear, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    between = {"full_attention": linear, "sliding_attention": {"rope_type": "default"}}  # theta left outside
    for config in (old, *({"model_type": "gemma3_text", "rope_parameters": new} for new in (nested, between))):
        assert Rope.from_hf_config(config, "full_attention") == full
        assert Rope.from_hf_config(config, layer_type="sliding_attention") == Rope(1e4)
    assert Rope.from_hf_config(old) == full
    with pytest.raises(
        UnsupportedError, match="layer_type: expected one of full_attention, sliding_attention, got None"
    ):
        Rope.from_hf_config({"model_type": "gemma3_text", "rope_parameters": nested})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"rope_scaling": {"type": "ntk"}},
            UnsupportedError,
            "rope_type: expected one of default, linear, dynamic, llama3, llama4, yarn, longrope, got 'ntk'",
        ),
        ({"rope_scaling": {"rope_type": "proportional"}}, UnsupportedError, "rope_type: expected one of default"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
            UnsupportedError,
            "alpha: expected none, got 1000.0",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
            UnsupportedError,
            "mrope_section: expected none",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8}},
            ShapeError,
            "rope_parameters: expected low_freq_factor, high_freq_factor for llama3, got rope_type",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ShapeError, "rope_parameters: expected factor for linear"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, DTypeError, "factor: expected a number, got '8'"),
        ({"rope_scaling": "su"}, DTypeError, "rope_scaling: expected a dict or null, got 'su'"),
        ({"partial_rotary_factor": 0.3, "head_dim": 10}, ShapeError, "rotary_dim: expected an even number"),
        ({"partial_rotary_factor": "half"}, DTypeError, "partial_rotary_factor: expected a number"),
        ({"rope_theta": -1}, ShapeError, "theta: expected a number above 0"),
        ({"text_config": [1]}, DTypeError, "text_config: expected a dict, got list"),
    ],
)
def test_configurations_refused_by_name(change, error, says):
    with pytest.raises(error) as caught:
        Rope.from_hf_config({**LLAMA, **change})
    assert str(caught.value).startswith(says)


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(UnsupportedError, match=r"config: expected a readable file, got .*config.json: No such file"):
        Rope.from_hf_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ShapeError, match="config: expected JSON"):
        Rope.from_hf_config(tmp_path)
    with pytest.raises(DTypeError, match=r"config: expected a dict or the path of config\.json, got int"):
        Rope.from_hf_config(3)


def test_replace_keeps_checking():
    assert replace(Rope(), style="gptj") == Rope(style="gptj")
    with pytest.raises(ShapeError):
        replace(Rope(), rotary_dim=3)
