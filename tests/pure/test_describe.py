"""Descriptions of kernels: what they mean, what comes back, and what is refused by name."""

from __future__ import annotations

import json

import pytest

import treeattn as ta
from treeattn.ahead.describe import MASKS, describe, load_description, mask_text, read_mask, read_spec, specs_of_model
from treeattn.errors import DTypeError, IndexRangeError, ShapeError, TreeAttnError, UnsupportedError
from treeattn.kernels.spec import KernelSpec

BASE = {"d_qk": 64, "q_dtype": "float16", "mask": "tree"}
TREE = ta.Tree([])


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("tree & (window | sink)", TREE & (ta.Window(1) | ta.Sink(1))),
        ("Causal&Window|sink", ta.Causal() & ta.Window(1) | ta.Sink(1)),
        ("causal & window | sink", (ta.Causal() & ta.Window(1)) | ta.Sink(1)),
        ("valid_length", ta.ValidLength([1])),
        (" causal & padded_left ", ta.Causal() & ta.PaddedLeft([1])),
        ("full", ta.Full()),
        ("window & window", ta.Window(1) & ta.Window(2)),
    ],
)
def test_mask_text_means_the_mask(text, mask):
    assert read_mask(text).form == mask.form
    assert read_mask(mask_text(mask.form)).form == mask.form


@pytest.mark.parametrize("name", MASKS)
def test_full_decides_nothing_beside_another(name):
    assert read_spec(BASE | {"mask": f"full & {name}"}) == read_spec(BASE | {"mask": name})


def test_defaults_and_every_key():
    assert read_spec(BASE) == KernelSpec(64, 64, "float16", "float16", TREE.form)
    spec = KernelSpec(
        64, 32, "float32", "bfloat16", TREE.form, ("gptj", 16), ("softcap", "alibi", "sinks"), shared=True, moved=True
    )
    assert read_spec(describe(spec)) == spec == read_spec(json.loads(json.dumps(describe(spec))))
    assert read_spec(spec) is spec


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"fly": 1}, UnsupportedError, "got fly"),
        ({"d_qk": 0}, IndexRangeError, "spec.d_qk: expected 1 to"),
        ({"d_qk": True}, DTypeError, "spec.d_qk: expected an integer, got True"),
        ({"d_v": "64"}, DTypeError, "spec.d_v"),
        ({"d_qk": 10**9}, IndexRangeError, "spec.d_qk"),
        ({"q_dtype": "float64"}, DTypeError, "spec.q_dtype: expected float32, float16, bfloat16, got 'float64'"),
        ({"kv_dtype": ["float16"]}, DTypeError, "spec.kv_dtype"),
        ({"softcap": 50.0}, DTypeError, "spec.softcap: expected true or false"),
        ({"rope": "neox"}, DTypeError, "spec.rope"),
        ({"rope": {"theta": 1e4}}, DTypeError, "spec.rope"),
        ({"rope": {"style": "llama"}}, UnsupportedError, "spec.rope.style: expected neox or gptj, got 'llama'"),
        ({"rope": {"rotary_dim": 33}}, ShapeError, "an even number up to d_qk"),
        ({"rope": {"rotary_dim": 66}}, ShapeError, "an even number up to d_qk"),
        ({"shared": True, "d_v": 65}, ShapeError, "spec.d_v"),
        ({"mask": None}, DTypeError, "spec.mask: expected text"),
        ({"mask": ""}, UnsupportedError, "spec.mask"),
        ({"mask": "tree & trunk"}, UnsupportedError, "trunk is none of them"),
        ({"mask": "tree & window(9)"}, UnsupportedError, "write window alone"),
        ({"mask": "tree + sink"}, UnsupportedError, "spec.mask"),
        ({"mask": "tree & tree"}, UnsupportedError, "at most one Tree"),
        ({"mask": "(" * 500 + "tree"}, UnsupportedError, "spec.mask"),
        ({"mask": "__import__('os')"}, UnsupportedError, "spec.mask"),
    ],
)
def test_bad_values_are_refused_by_name(changes, error, text):
    with pytest.raises(error) as caught:
        read_spec(BASE | changes)
    assert text in str(caught.value)


@pytest.mark.parametrize("missing", BASE)
def test_missing_keys_are_named(missing):
    with pytest.raises(ShapeError, match=f"expected {missing} too"):
        read_spec({key: value for key, value in BASE.items() if key != missing})


@pytest.mark.parametrize("description", [None, 3, [BASE]])
def test_no_description(description):
    with pytest.raises(DTypeError, match="spec: expected a dict"):
        read_spec(description)


def test_files(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(BASE))
    assert load_description(path) == BASE
    assert read_spec(path) == read_spec(str(path)) == read_spec(json.dumps(BASE)) == read_spec(BASE)
    for content in ("{", "[" * 100_000, "\xff"):
        path.write_text(content, encoding="latin-1")
        with pytest.raises(ShapeError, match="expected a JSON object"):
            load_description(path)


GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 2048}
SMOLLM = {
    "model_type": "smollm3", "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64, "hidden_size": 256,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_a_model_needs_a_kernel_for_each_kind_of_layer():
    found = specs_of_model(ta.spec_from_hf_config(GEMMA), dtype="float32")
    by_mask = {describe(spec)["mask"]: layers for spec, layers in found.items()}
    assert by_mask == {"tree & window": (0, 1, 2, 3, 4, 6, 7, 8, 9, 10), "tree": (5, 11)}
    assert {spec.d_qk for spec in found} == {256}


def test_rotation_within_kernels():
    found = specs_of_model(ta.spec_from_hf_config(SMOLLM), rotate=True)
    assert {spec.rope: layers for spec, layers in found.items()} == {("neox", 64): (0, 1, 2), None: (3,)}
    assert len(specs_of_model(ta.spec_from_hf_config(SMOLLM))) == 1


def test_parts_of_a_model():
    gpt_oss = ta.spec_from_hf_config({"model_type": "gpt_oss", "num_hidden_layers": 2, "num_attention_heads": 8})
    assert all("sinks" in spec.logits for spec in specs_of_model(gpt_oss))
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    latent = ta.spec_from_hf_config(
        {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_attention_heads": 16} | sizes
    )
    (spec,) = specs_of_model(latent)
    assert (spec.d_qk, spec.d_v, spec.shared) == (576, 512, True)
    with pytest.raises(UnsupportedError, match="rope"):
        specs_of_model(latent, rotate=True)
    with pytest.raises(TreeAttnError, match=r"spec\.q_dtype"):
        specs_of_model(gpt_oss, dtype="int8")
