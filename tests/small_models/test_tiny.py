"""Tiny random models: whole folders that transformers loads, and a tokenizer that loses nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_mlm.errors import UserError
from grpo_mlm.small_models import tiny
from grpo_mlm.small_models.aside import made_aside

MAKERS = {"qwen3": tiny.make_qwen3, "llama": tiny.make_llama, "qwen2": tiny.make_qwen2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for family, make in MAKERS.items():
        make(root / "deeper" / family)
    return {family: root / "deeper" / family for family in MAKERS}


@pytest.mark.parametrize("family", MAKERS)
def test_transformers_loads_the_folder_and_logits_are_not_flat(folders: dict[str, Path], family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[family]).eval()
    assert model.config.model_type == family
    assert model.dtype == torch.float32
    heads = model.config.num_attention_heads
    assert (getattr(model.config, "head_dim", None) or model.config.hidden_size // heads) >= 32
    with torch.no_grad():
        probabilities = model(torch.arange(4, 24)[None]).logits.softmax(-1)
    # Far from uniform, so that a wrong layer shows; far from one-hot, so that sampling has a choice.
    largest = probabilities.amax(-1).mean().item()
    assert 2 / tiny.VOCAB_SIZE < largest < 0.9


@pytest.mark.parametrize("family", MAKERS)
def test_every_bias_and_norm_is_distinguishable_from_its_default(
    folders: dict[str, Path], family: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[family])
    small = {n: p for n, p in model.named_parameters() if p.dim() == 1}
    assert small
    assert any("bias" in n for n in small) == (family == "qwen2")
    assert any("q_norm" in n for n in small) == (family == "qwen3")
    assert all(p.std() > 0.01 for p in small.values())


def test_weights_come_from_a_fixed_seed_and_leave_the_global_generator_alone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    tiny.make_qwen3(tmp_path / "again")
    assert torch.equal(torch.rand(1), expected)
    first = (folders["qwen3"] / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == first


@pytest.mark.parametrize("family", MAKERS)
def test_tokenizer_is_one_character_a_token_and_round_trips(folders: dict[str, Path], family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[family])
    text = "What is  12+3?\n(a, B) = <c>!"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == tiny.VOCAB_SIZE
    assert set(tokenizer("é").input_ids) <= {tokenizer.unk_token_id}
    assert tokenizer.convert_ids_to_tokens(list(range(4))) == list(tiny.SPECIAL)


def test_special_tokens_agree_between_tokenizer_config_and_template(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert config[name] == getattr(tokenizer, name)
        assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
        chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokenizer.decode(ids) == "<bos><system>s\n<user>1+1\n<assistant>"
        assert ids.count(tokenizer.bos_token_id) == 1


def test_concurrent_makers_leave_one_whole_folder_and_nothing_else(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: _make_without_looking(tmp_path / "m"), range(8)))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["config.json", "weights"]


def _make_without_looking(folder: Path) -> None:
    with made_aside(folder) as aside:
        (aside / "weights").write_text("w")
        (aside / "config.json").write_text("{}")


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with made_aside(tmp_path / "m") as aside:
            (aside / "config.json").write_text("{}")
            raise KeyError("half-way")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_an_error_that_names_it_and_stays(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not a model"):
        tiny.make_llama(tmp_path / "m")
    assert (tmp_path / "m" / "thesis.txt").read_text() == "precious"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"set model\.path"):
        tiny.make_llama(tmp_path / "file" / "m")
