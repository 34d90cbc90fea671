"""Small language models on treeattn's attention and cache: llama, qwen2 and gemma3, from GGUF or safetensors.

`load_model` reads a file; `treeattn.generation` runs prompts, one or many at a time, with or without drafts.
"""

from __future__ import annotations

from .checkpoint import ModelFileError as ModelFileError
from .checkpoint import load_checkpoint as load_checkpoint
from .config import ModelConfig as ModelConfig
from .network import Model as Model
from .network import load_model as load_model
from .tokenizer import Tokenizer as Tokenizer
