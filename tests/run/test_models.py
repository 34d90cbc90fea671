"""The runner on tiny random models: against transformers, against itself one token at a time, and its bad inputs."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tiny_model

from treeattn.errors import IndexRangeError, ShapeError, TreeAttnError, UnsupportedError
from treeattn.generation import Generator, Sampling
from treeattn.models import load_model
from treeattn.models.checkpoint import ModelFileError, load_checkpoint
from treeattn.speculate.budget import StepCost
from treeattn.speculate.draft import ModelDrafter, NgramDrafter

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="the extra models is not installed")

PROMPTS = [b"the cat sat on the mat, the cat sat on", b"abcabcabcabcab", b"x", b"one two one two three one two"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: tiny_model.write(tmp_path_factory.mktemp(kind), kind) for kind in tiny_model.CONFIGS}


@pytest.fixture(scope="module")
def models(folders):
    return {kind: load_model(folder)[0] for kind, folder in folders.items()}


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.int32)


def logits_of(model, tokens):
    cache = model.new_cache(32)
    seq = cache.add()
    return model.forward(cache.begin({seq: len(tokens)}), tokens)


def decode(model, prompts, count=60, **options):
    """Tokens of each prompt, all in one generator."""
    sampling = options.pop("sampling", None)
    generator = Generator(model, **options)
    requests = [generator.submit(prompt, count, sampling=sampling) for prompt in prompts]
    generator.run()
    return [request.tokens for request in requests], generator


@pytest.mark.parametrize("kind", tiny_model.CONFIGS)
def test_logits_are_those_of_transformers(folders, models, kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32).eval()
    tokens = tokens_of(40)
    with torch.inference_mode():
        want = theirs(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].numpy()
    got = logits_of(models[kind], tokens)
    spread = want.std()
    assert np.abs(got - want).max() < 2e-4 * spread, f"{np.abs(got - want).max()} of {spread}"


@pytest.mark.parametrize("kind", tiny_model.CONFIGS)
def test_a_prompt_at_once_is_its_tokens_one_by_one(models, kind):
    model, tokens = models[kind], tokens_of(30, seed=1)
    cache = model.new_cache(8)
    seq = cache.add()
    rows = []
    for token in tokens:
        step = cache.begin({seq: 1})
        rows.append(model.forward(step, token[None])[0])
        cache.commit(step, {seq: 1})
    np.testing.assert_array_equal(np.stack(rows), logits_of(model, tokens))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_other_matrix_libraries_agree(folders, models, library):
    if library == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    other, tokens = load_model(folders["qwen2"], linear=library)[0], tokens_of(20)
    np.testing.assert_allclose(logits_of(other, tokens), logits_of(models["qwen2"], tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", tiny_model.CONFIGS)
@pytest.mark.parametrize("batched", [False, True])
def test_ngram_drafts_change_no_token(models, kind, batched):
    model = models[kind]
    plain = [decode(model, [prompt])[0][0] for prompt in PROMPTS]
    batches = [PROMPTS] if batched else [[prompt] for prompt in PROMPTS]
    drafted, accepted = [], 0
    for batch in batches:
        tokens, generator = decode(model, batch, drafter=NgramDrafter(), cost=StepCost(0.01, learns=False))
        drafted += tokens
        accepted += sum(generator.stats.accepted)
    assert drafted == plain
    assert accepted > 10  # otherwise nothing was tried


def test_a_draft_model_of_another_vocabulary_is_refused(models, tmp_path):
    draft = load_model(tiny_model.write(tmp_path / "draft", "llama", vocab_size=300))[0]
    with pytest.raises(ShapeError, match="drafter: expected a model with the same tokenizer"):
        Generator(models["llama"], drafter=ModelDrafter(draft, 8))


def test_model_drafts_change_no_token(folders, models, tmp_path):
    model, draft = models["llama"], load_model(tiny_model.write(tmp_path / "draft", "llama", seed=0))[0]
    plain = [decode(model, [prompt])[0][0] for prompt in PROMPTS]
    for drafter in (ModelDrafter(draft, 64), ModelDrafter(models["qwen2"], 64)):
        tokens, generator = decode(model, PROMPTS, drafter=drafter, cost=StepCost(0.01, learns=False))
        assert tokens == plain
    tokens, generator = decode(model, PROMPTS, drafter=ModelDrafter(draft, 64, depth=3), cost=StepCost(0.0, False))
    assert generator.stats.tokens_per_step > 2 * len(PROMPTS)  # its own twin is right wherever it is sure


def test_drafts_change_no_token_in_half_precision(models):
    options = {"cache_dtype": "float16"}
    plain = [decode(models["llama"], [prompt], **options)[0][0] for prompt in PROMPTS]
    assert decode(models["llama"], PROMPTS, drafter=NgramDrafter(), **options)[0] == plain


def test_trees_are_the_same_at_every_run(models):
    def drafted():
        return decode(models["llama"], PROMPTS, drafter=NgramDrafter(), cost=StepCost(0.02, False))[1].stats.drafted

    assert drafted() == drafted()


def test_sampling_is_seeded_and_drafts_keep_its_distribution(models):
    model, sampling = models["llama"], Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)
    first, again = (decode(model, PROMPTS[:2], sampling=sampling)[0] for _ in range(2))
    assert first == again
    drafter, prompt = NgramDrafter(), PROMPTS[1]
    cost = StepCost(0.01, learns=False)
    counts = {}
    for name, options in (("plain", {}), ("drafts", {"drafter": drafter, "cost": cost})):
        seen = [
            decode(model, [prompt], 3, sampling=Sampling(0.5, top_k=3, seed=seed), **options)[0][0][1]
            for seed in range(120)
        ]
        counts[name] = np.bincount(seen, minlength=model.vocab_size)
    both = counts["plain"] + counts["drafts"]
    kept = both > 0
    chi_square = ((counts["plain"] - counts["drafts"])[kept] ** 2 / both[kept]).sum()
    assert chi_square < kept.sum() + 5 * np.sqrt(2 * kept.sum())


def test_sequences_join_and_leave_between_steps(models):
    model = models["llama"]
    plain = [decode(model, [prompt])[0][0] for prompt in PROMPTS]
    generator = Generator(model, drafter=NgramDrafter())
    first = generator.submit(PROMPTS[0], 60)
    for _ in range(3):
        generator.step()
    second = generator.submit(PROMPTS[1], 60)
    generator.step()
    generator.cancel(first)
    third = generator.submit(PROMPTS[2], 60)
    generator.run()
    assert first.finished == "cancelled"
    assert plain[0][: len(first.tokens)] == first.tokens
    assert [second.tokens, third.tokens] == plain[1:3]


def test_requests_wait_for_room(models):
    plain = [decode(models["llama"], [prompt])[0][0] for prompt in PROMPTS]
    tokens, _ = decode(models["llama"], PROMPTS, capacity=240)  # room for one and a half
    assert tokens == plain


def test_the_least_capacity_will_do(models):
    """Prompt, tokens and drafts, to the token: pages of one."""
    prompt, options = PROMPTS[3], {"drafter": NgramDrafter(), "most_drafts": 8, "page_size": 1}
    ((plain,), _) = decode(models["llama"], [prompt])
    least = len(prompt) + len(plain) + 8
    generator = Generator(models["llama"], least, **options)
    request = generator.submit(prompt, len(plain))
    generator.run()
    assert request.tokens == plain
    with pytest.raises(ShapeError, match="raise capacity"):
        Generator(models["llama"], least - 1, **options).submit(prompt, len(plain))


def test_a_step_that_fails_can_be_made_again(models, monkeypatch):
    prompt = PROMPTS[3]
    ((whole,), _) = decode(models["llama"], [prompt])
    generator = Generator(models["llama"], 256, drafter=NgramDrafter())
    request = generator.submit(prompt, len(whole))
    forward = models["llama"].forward
    for fails in (True, False, True, True, False):
        monkeypatch.setattr(models["llama"], "forward", no_memory if fails else forward)
        if fails:
            with pytest.raises(MemoryError):
                generator.step()
        else:
            generator.step()
    generator.run()
    assert request.tokens == whole


def no_memory(*_):
    raise MemoryError


def test_generation_ends_at_a_stop_token_and_at_the_limit(models):
    model, prompt = models["llama"], PROMPTS[0]
    plain = decode(model, [prompt])[0][0]
    stop = plain[7]
    generator = Generator(model, drafter=NgramDrafter(), cost=StepCost(0.01, learns=False))
    request, short = generator.submit(prompt, 60, stop_tokens={stop}), generator.submit(prompt, 5)
    generator.run()
    assert request.tokens == plain[: plain.index(stop) + 1]
    assert request.finished == "stop"
    assert (short.tokens, short.finished) == (plain[:5], "length")


def test_a_long_prompt_is_run_in_parts(models):
    prompt = tokens_of(700, seed=4).tolist()
    want = logits_of_long(models["llama"], prompt).argmax()
    assert decode(models["llama"], [prompt], 1)[0][0] == [want]


def logits_of_long(model, prompt):
    cache = model.new_cache(64)
    return model.forward(cache.begin({cache.add(): len(prompt)}), np.array(prompt, np.int32), [len(prompt) - 1])[0]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "named"),
    [
        ([], {}, ShapeError, "prompt"),
        ([1], {"max_tokens": 0}, IndexRangeError, "max_tokens"),
        ([1, 9999], {}, IndexRangeError, "prompt"),
        ([1], {"max_tokens": 4000}, ShapeError, "prompt"),
        ([1] * 1500, {}, ShapeError, "capacity"),
    ],
)
def test_bad_requests_are_refused(models, prompt, options, error, named):
    generator = Generator(models["llama"], 1024)
    with pytest.raises(error, match=named):
        generator.submit(prompt, **options)
    assert generator.is_idle


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_bad_sampling_is_refused(options):
    with pytest.raises((ShapeError, IndexRangeError), match=next(iter(options))):
        Sampling(**options)


def test_top_k_and_top_p_keep_the_fewest():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    assert Sampling(1.0, top_k=2).probabilities(logits)[0] == pytest.approx([0.625, 0.375, 0, 0])
    assert Sampling(1.0, top_p=0.8).probabilities(logits)[0] == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    assert Sampling(1.0, top_p=0.81).probabilities(logits)[0, 3] == 0
    np.testing.assert_allclose(Sampling(2.0).probabilities(logits).sum(), 1)


def test_damaged_and_foreign_files_are_named(folders, tmp_path):
    truncated = tiny_model.write(tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path, error, named in (
        (truncated, ModelFileError, "model.safetensors"),
        (tmp_path / "none", ModelFileError, "none"),
        (tmp_path, ModelFileError, r"config\.json"),
    ):
        with pytest.raises(error, match=named):
            load_checkpoint(path)
    pytest.importorskip("gguf", reason="the extra models is not installed")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\1" * 40)
    with pytest.raises(TreeAttnError, match=r"bad\.gguf"):
        load_checkpoint(tmp_path / "bad.gguf")


def test_other_architectures_and_missing_weights_are_refused(tmp_path):
    folder = tiny_model.write(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "phi3"}))
    with pytest.raises(UnsupportedError, match="model_type"):
        load_model(folder)
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    with pytest.raises(UnsupportedError, match="rope_scaling"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ModelFileError, match=r"blk\.3\."):
        load_model(folder)


def test_half_precision_files_load(tmp_path):
    import ml_dtypes
    from safetensors.numpy import load_file, save_file

    folder = tiny_model.write(tmp_path / "half")
    weights = load_file(folder / "model.safetensors")
    for dtype in (np.float16, ml_dtypes.bfloat16):
        save_file({name: array.astype(dtype) for name, array in weights.items()}, folder / "model.safetensors")
        loaded = load_checkpoint(folder).weights["blk.0.attn_q.weight"]
        want = weights["model.layers.0.self_attn.q_proj.weight"].astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(loaded, want)


def test_text_streams_in_whole_characters(folders):
    tokenizer = load_model(folders["llama"])[1]
    text = "naïve 🌳 café 木"
    tokens = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.push([token], last=token is tokens[-1]) for token in tokens]
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert pieces[0] == "n"
    broken = tokenizer.stream()
    cut = tokenizer.encode("a木")[:-1]
    assert broken.push(cut) == "a"
    assert broken.push([], last=True) != ""


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 96}, {"num_attention_heads": 3, "num_key_value_heads": 1}, {"head_dim": 4}, {"head_dim": 16}],
    ids=str,
)
def test_weights_of_other_sizes_than_the_configuration_says_are_refused(folders, tmp_path, changes):
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelFileError, match=r"expected shape \[.*\] by the configuration, got"):
        load_model(folder, "numpy")


def test_a_product_may_have_a_bias_in_one_of_its_parts(folders, tmp_path):
    folder = shutil.copytree(folders["qwen2"], tmp_path / "model")
    weights = safetensors_numpy.load_file(folder / "model.safetensors")
    zero = {name: np.zeros_like(part) if "k_proj.bias" in name else part for name, part in weights.items()}
    logits = []
    for kept in (zero, {name: part for name, part in weights.items() if "k_proj.bias" not in name}):
        safetensors_numpy.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        logits.append(logits_of(load_model(folder, "numpy")[0], tokens_of(9)))
    assert np.array_equal(*logits)


@pytest.mark.parametrize("name", ["prompt", "max_tokens", "stop_tokens", "sampling"])
@pytest.mark.parametrize("junk", [1.5, "x", [1.5], ["a"], [[1]], [2**70], object()], ids=str)
def test_junk_in_a_request(models, name, junk):
    generator = Generator(models["llama"], 256)
    with pytest.raises(TreeAttnError, match=f"^{name}"):
        generator.submit(**{"prompt": [1], "max_tokens": 2, name: junk})
    assert generator.is_idle
