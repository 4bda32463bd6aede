"""Trainer ranks -> Hugging Face folder: the same tensors back, from one process and from several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from grpo_mlm.bridge.export import export_hf
from grpo_mlm.bridge.hf_files import load_layout
from grpo_mlm.bridge.hf_index import tensor_files
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import read_model_spec


def make_model(folder: Path, tied: bool) -> None:
    """A tiny random model with files of every sort beside its weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config  # not in the processes that import this file

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        vocab_size=70,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    add_other_files(folder)


def add_other_files(folder: Path) -> None:
    """What lies beside the weights, and weights in another format."""
    (folder / "tokenizer.json").write_text('{"odd  spacing":1}')
    (folder / "chat_template.jinja").write_bytes(b"{{ x }}\r\n")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every file, whatever the index says."""
    out: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    return out


def round_trip(rank: int, sizes: tuple[int, int, int], source: Path, out: Path, max_file_bytes: int) -> None:
    """One rank's part: load from `source`, export to `out`."""
    spec, (tp, pp, dp) = read_model_spec(source), sizes
    layouts = megatron_layouts(spec, MegatronParallel(tp, pp), dp)
    params = {name: torch.empty(shape) for name, shape in layouts[rank].shapes.items()}
    load_layout(source, layouts[rank], params)
    export_hf(out, source, spec, layouts, rank, params, max_file_bytes=max_file_bytes)


def process(rank: int, store: Path, sizes: tuple[int, int, int], source: Path, out: Path) -> None:
    world = sizes[0] * sizes[1] * sizes[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    round_trip(rank, sizes, source, out, 100_000)
    with pytest.raises(RunFailure, match="already there"):  # on every rank: none is left waiting
        round_trip(rank, sizes, source, out, 100_000)
    dist.destroy_process_group()


def assert_same_model(out: Path, source: Path) -> None:
    """CNV-01: the same key set and the same bits; every other file byte for byte."""
    wanted, got = tensors_of(source), tensors_of(out)
    assert got.keys() == wanted.keys() == tensor_files(out).keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "pytorch_model.bin").exists()
    assert [p.name for p in out.parent.iterdir() if p.name.startswith(out.name)] == [out.name]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_comes_back_bit_for_bit_and_loads_in_transformers(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    source, out = tmp_path / "source", tmp_path / "runs" / "step_3"
    make_model(source, tied)
    round_trip(0, (1, 1, 1), source, out, 1 << 30)
    assert_same_model(out, source)
    assert not (out / "model.safetensors.index.json").exists()
    ids = torch.arange(12).view(1, -1)
    with torch.no_grad():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (out, source))
    assert torch.equal(ours, theirs)


def test_files_are_cut_at_their_size_and_indexed(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make_model(source, tied=False)
    round_trip(0, (1, 1, 1), source, out, 100_000)
    assert_same_model(out, source)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    sizes = {file: sum(t.nbytes for t in load_file(out / file).values()) for file in files}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert len(files) > 2
    assert max(sizes.values()) <= 100_000


def test_a_tied_head_in_the_source_is_in_the_export(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make_model(source, tied=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    round_trip(0, (1, 1, 1), source, out, 1 << 30)
    assert_same_model(out, source)


def test_a_bias_that_stays_float32_does_so_beside_bfloat16(tmp_path: Path) -> None:
    """dots.llm1: one file holds both precisions."""
    from transformers import AutoModelForCausalLM, Dots1Config

    source, out = tmp_path / "source", tmp_path / "out"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40}
    experts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    model = AutoModelForCausalLM.from_config(Dots1Config(**sizes, **heads, **experts))
    model.save_pretrained(source)
    add_other_files(source)
    file = source / "model.safetensors"
    tensors = {
        name: torch.randn_like(t, dtype=torch.float32) if name.endswith("bias") else t.bfloat16()
        for name, t in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    assert any(name.endswith("e_score_correction_bias") for name in tensors)
    spec = read_model_spec(source)
    (layout,) = megatron_layouts(spec, MegatronParallel(), 1)
    params = {
        name: torch.empty(shape, dtype=torch.float32 if name.endswith("expert_bias") else torch.bfloat16)
        for name, shape in layout.shapes.items()
    }
    load_layout(source, layout, params)
    export_hf(out, source, spec, [layout], 0, params)
    assert_same_model(out, source)


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make_model(source, tied=True)
    out.mkdir()
    with pytest.raises(RunFailure, match="already there"):
        round_trip(0, (1, 1, 1), source, out, 1 << 30)
    assert list(out.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "sizes"), [(True, (2, 2, 1)), (False, (2, 1, 2))])
def test_ranks_export_together_what_they_hold(
    tmp_path: Path, tied: bool, sizes: tuple[int, int, int]
) -> None:
    """CNV-01, CNV-04: tensor and pipeline slices of four processes, or two replicas that share the sending."""
    source, out = tmp_path / "source", tmp_path / "out"
    make_model(source, tied)
    mp.spawn(process, args=(tmp_path / "store", sizes, source, out), nprocs=4)
    assert_same_model(out, source)
