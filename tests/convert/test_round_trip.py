"""Hugging Face -> Megatron distributed checkpoint -> Hugging Face: the same bits under the same names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mlm.convert.job import convert, export_checkpoint, import_checkpoint
from grpo_mlm.convert.options import Options, Silent
from tests.convert.command import QWEN3_MOE
from tests.convert.command import make_model as make_folder
from tests.convert.models import FAMILIES, Told, assert_same_weights, contents, logits, make_model, manifest

PLAIN = Options()
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja")


def there_and_back(source: Path, there: Path, back: Path, options: Options = PLAIN) -> None:
    import_checkpoint(source, there, options, Silent())
    export_checkpoint(there, back, options, Silent())


@pytest.mark.parametrize("vocab_size", [70, 128])  # one is padded to a multiple of 128, one is not
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, family: str, tied: bool, vocab_size: int) -> None:
    """CNV-01, CNV-03 (8 experts), CNV-04 (4 layers)."""
    source = make_model(tmp_path / "hf", family, tie_word_embeddings=tied, vocab_size=vocab_size)
    there_and_back(source, tmp_path / "dist", tmp_path / "back")
    assert_same_weights(tmp_path / "back", source)
    for name in SIDE_FILES:
        wanted = (source / name).read_bytes()
        assert (tmp_path / "dist" / "hf" / name).read_bytes() == wanted
        assert (tmp_path / "back" / name).read_bytes() == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_transformers_computes_the_same_with_it(tmp_path: Path, family: str) -> None:
    """CNV-01, CNV-07: a norm epsilon of 1e-2."""
    source = make_model(tmp_path / "hf", family, tie_word_embeddings=family == "llama")
    there_and_back(source, tmp_path / "dist", tmp_path / "back", Options(max_shard_size=100_000))
    assert torch.equal(logits(tmp_path / "back"), logits(source))


def test_files_are_cut_at_their_size_and_indexed(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "qwen3_moe")
    there_and_back(source, tmp_path / "dist", tmp_path / "back", Options(max_shard_size=100_000))
    assert_same_weights(tmp_path / "back", source)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in sorted((tmp_path / "back").glob("*.safetensors"))}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert len(sizes) > 2
    assert max(sizes) <= 100_000
    assert next(iter(files)) == f"model-00001-of-{len(files):05}.safetensors"
    assert len(list((tmp_path / "dist").glob("*.distcp"))) > 2


def test_the_spelling_of_the_source_is_kept(tmp_path: Path) -> None:
    """A tied head that is written out, and the experts of a layer in one tensor."""
    source = make_model(tmp_path / "hf", "qwen3_moe", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts."
        each = [
            {x: tensors.pop(f"{experts}{e}.{x}_proj.weight") for x in ("gate", "up", "down")}
            for e in range(8)
        ]
        tensors[experts + "gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
        tensors[experts + "down_proj"] = torch.stack([e["down"] for e in each])
    save_file(tensors, source / "model.safetensors")
    there_and_back(source, tmp_path / "dist", tmp_path / "back")
    assert_same_weights(tmp_path / "back", source)


def test_one_format_to_itself(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "qwen2")
    options = Options(max_shard_size=50_000)
    convert(source, tmp_path / "shards", "hf", options, Silent())
    assert_same_weights(tmp_path / "shards", source)
    convert(tmp_path / "shards", tmp_path / "dist", "torch_dist", Options(), Silent())
    convert(tmp_path / "dist", tmp_path / "dist2", "torch_dist", options, Silent())
    convert(tmp_path / "dist2", tmp_path / "back", "hf", Options(), Silent())
    assert_same_weights(tmp_path / "back", source)


def test_a_save_root_leads_to_its_latest_iteration(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "mistral")
    root = tmp_path / "root"
    import_checkpoint(source, root / "iter_0000012", Options(), Silent())
    (root / "latest_checkpointed_iteration.txt").write_text("12\n")
    export_checkpoint(root, tmp_path / "back", Options(), Silent())
    assert_same_weights(tmp_path / "back", source)


def test_a_checkpoint_without_a_config_takes_the_references(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "qwen2")
    import_checkpoint(source, tmp_path / "dist", Options(), Silent())
    (tmp_path / "dist" / "hf").rename(tmp_path / "reference")
    export_checkpoint(
        tmp_path / "dist", tmp_path / "back", Options(reference=tmp_path / "reference"), Silent()
    )
    assert_same_weights(tmp_path / "back", source)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_cast_and_the_config_says_so(tmp_path: Path, dtype: str) -> None:
    source = make_model(tmp_path / "hf", "llama")
    told = Told()
    import_checkpoint(source, tmp_path / "dist", Options(dtype=dtype), told)
    export_checkpoint(tmp_path / "dist", tmp_path / "back", Options(), Silent())
    wanted, got = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor.to(getattr(torch, dtype))), name
        assert got[name].dtype == getattr(torch, dtype)
    before, after = ((folder / "config.json").read_text() for folder in (source, tmp_path / "back"))
    assert after == before.replace('"dtype": "float32"', f'"dtype": "{dtype}"')
    changes = [] if dtype == "float32" else [f"config.json: dtype float32 -> {dtype}"]
    assert manifest(tmp_path / "dist")["changes"] == changes
    assert [line for line in told.lines if line.startswith("config.json")] == changes


def test_workers_and_blocks_change_no_byte(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "qwen3")
    for output in ("torch_dist", "hf"):
        outs = [tmp_path / f"{output}_{n}" for n in (1, 3)]
        for out, workers in zip(outs, (1, 3), strict=True):
            told = Told()
            options = Options(workers=workers, max_shard_size=30_000, memory_limit=60_000)
            convert(source, out, output, options, told)
            assert told.done == told.total > 0
        assert contents(outs[0]) == contents(outs[1])


def test_values_that_are_no_numbers_are_copied_and_named(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "llama")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][3, 4], tensors[name][5, 6] = torch.nan, -torch.inf
    save_file(tensors, source / "model.safetensors")
    told = Told()
    result = convert(source, tmp_path / "out", "hf", Options(), told)
    assert result.not_finite == manifest(tmp_path / "out")["not_finite"] == {name: 2}
    assert any(name in line and "2 values" in line for line in told.lines)
    wanted, got = tensors[name], load_file(tmp_path / "out" / "model.safetensors")[name]
    assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))


def test_what_may_be_missing_is_left_out_and_recorded(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "llama")
    tensors = load_file(source / "model.safetensors")
    gone = "model.layers.1.input_layernorm.weight"
    del tensors[gone]
    tensors["extra.weight"] = torch.ones(3)
    save_file(tensors, source / "model.safetensors")
    options = Options(allow_missing=("extra.*", "model.layers.1.input*"))
    told = Told()
    result = convert(source, tmp_path / "out", "hf", options, told)
    assert set(result.skipped) == set(manifest(tmp_path / "out")["skipped"]) == {gone, "extra.weight"}
    assert sum("left out" in line for line in told.lines) == 2
    del tensors["extra.weight"]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


def test_the_manifest_names_source_files_and_hashes(tmp_path: Path) -> None:
    import hashlib

    source = make_model(tmp_path / "hf", "qwen2")
    import_checkpoint(source, tmp_path / "dist", Options(), Silent())
    said = manifest(tmp_path / "dist")
    for name, file in said["files"].items():
        content = (tmp_path / "dist" / name).read_bytes()
        assert file == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert {"model.safetensors", "config.json"} <= {file["name"] for file in said["source_files"]}
    assert said["versions"]["torch"]
    assert said["options"]["dtype"] == "keep"


def test_a_bias_on_the_routers_scores_is_never_cast(tmp_path: Path) -> None:
    """In bfloat16, biases that differ become equal, and other experts are chosen."""
    config = QWEN3_MOE | {"model_type": "dots1", "n_routed_experts": 4, "n_shared_experts": 1}
    source = make_folder(tmp_path / "hf", config | {"first_k_dense_replace": 0})
    there_and_back(source, tmp_path / "dist", tmp_path / "back", Options(dtype="bfloat16"))
    for name, tensor in load_file(source / "model.safetensors").items():
        bias = name.endswith("e_score_correction_bias")
        wanted = tensor if bias else tensor.bfloat16()
        got = load_file(tmp_path / "back" / "model.safetensors")[name]
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name
