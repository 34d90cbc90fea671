"""Write tests/data/smollm2_logits.json: logits of transformers for the weights that ``--model smollm2`` runs.

    python tools/reference_logits.py

Transformers' own Llama in float32 gets the weights our reader dequantised, so what is compared is the forward pass.
Of every position it keeps the sum of the logits times fixed signs, and of the last one the 20 highest logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nName three trees.<|im_end|>\n<|im_start|>assistant\n",
)
TOP = 20


def main() -> None:
    """Run transformers and write the file."""
    import torch
    import transformers
    from generate_bench import theirs_of

    from treeattn.download import MODELS, fetch
    from treeattn.models.checkpoint import load_checkpoint

    path = fetch(MODELS["smollm2"])
    model, tokenizer = theirs_of(path), load_checkpoint(path).tokenizer
    assert tokenizer is not None
    found = []
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt)
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0].numpy()
        top = np.argsort(-logits[-1])[:TOP]
        signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), logits.shape[1])
        found.append(
            {
                "prompt": prompt,
                "tokens": tokens,
                "top_tokens": top.tolist(),
                "top_logits": [round(float(value), 5) for value in logits[-1, top]],
                "signed_sums": [round(float(value), 3) for value in logits.astype(np.float64) @ signs],
            }
        )
    record = {
        "made_by": f"tools/reference_logits.py, transformers {transformers.__version__}, torch {torch.__version__}",
        "weights": f"{MODELS['smollm2'].member}, sha256 {MODELS['smollm2'].sha256}, dequantised to float32",
        "signs": "numpy.random.default_rng(0).choice([-1.0, 1.0], vocabulary)",
        "prompts": found,
    }
    (ROOT / "tests" / "data" / "smollm2_logits.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
