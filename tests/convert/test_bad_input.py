"""Every way in which a conversion can be wrong from the start: one error, of the right class, that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_mlm.convert.job import convert, export_checkpoint, import_checkpoint
from grpo_mlm.convert.options import Options, Silent
from grpo_mlm.errors import NamesDiffer, OutOfResources, UserError
from tests.convert.models import Told, assert_same_weights, make_model

PLAIN = Options()
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_model(tmp_path / "hf", "llama")


def refused(kind: type[Exception], source: Path, words: str, options: Options = PLAIN) -> None:
    """The conversion ends with exactly this class of error, and leaves nothing that looks like its output."""
    out = source.with_name("out")
    for output in ("hf", "torch_dist"):
        with pytest.raises(kind, match=words) as error:
            convert(source, out, output, options, Silent())
        assert error.type is kind
        assert not out.exists()


def rewrite(source: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


def set_config(source: Path, **fields: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_missing_and_unknown_tensors(source: Path) -> None:
    rewrite(source, lambda t: t.pop(UP))
    refused(NamesDiffer, source, f"missing: {UP}")
    rewrite(source, lambda t: t.update({UP: torch.ones(48, 32), "model.extra": torch.ones(1)}))
    refused(NamesDiffer, source, r"not in this model: model\.extra")


def test_a_tensor_that_may_be_missing_cannot_leave_a_hole_in_another(source: Path) -> None:
    rewrite(source, lambda t: t.pop(UP))
    with pytest.raises(NamesDiffer, match=f"lacks {UP}.*cannot leave"):
        import_checkpoint(source, source.with_name("out"), Options(allow_missing=("*up_proj*",)), Silent())


def test_wrong_shapes_and_dtypes(source: Path) -> None:
    rewrite(source, lambda t: t.update({UP: torch.ones(47, 32)}))
    refused(UserError, source, rf"{UP} has shape \(47, 32\), config\.json means \(48, 32\)")
    rewrite(source, lambda t: t.update({UP: torch.ones(48, 32, dtype=torch.int8)}))
    refused(UserError, source, f"{UP} is stored as I8")


def test_dtypes_that_do_not_go_into_one_tensor(source: Path, tmp_path: Path) -> None:
    rewrite(source, lambda t: t.update({UP: t[UP].bfloat16()}))
    with pytest.raises(UserError, match=r"linear_fc1\.weight would hold .*--dtype"):
        import_checkpoint(source, tmp_path / "out", PLAIN, Silent())
    export_checkpoint(source, tmp_path / "hf2", PLAIN, Silent())
    assert_same_weights(tmp_path / "hf2", source)
    import_checkpoint(source, tmp_path / "out", Options(dtype="float32"), Silent())


def test_a_missing_and_a_cut_shard(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "qwen2", max_shard_size="30KB")
    shard = sorted(source.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    refused(UserError, source, f"{shard.name} is not a readable safetensors file: cut short")
    shard.unlink()
    refused(UserError, source, f"files that are not there: {shard.name}")


def test_an_index_with_a_key_that_is_in_no_file(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "qwen2", max_shard_size="30KB")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = files[0]
    path.write_text(json.dumps(index))
    refused(UserError, source, r"has no tensor model\.layers\.9\.mlp\.up_proj\.weight")


def test_unknown_architectures_adapters_and_remote_code(source: Path, tmp_path: Path) -> None:
    """CNV-10: an adapter."""
    (source / "modeling_llama.py").write_text("print('hello')")
    refused(UserError, source, r"remote code \(modeling_llama\.py\).*--allow-remote-code")
    export_checkpoint(source, tmp_path / "allowed", Options(allow_remote_code=True), Silent())
    assert (tmp_path / "allowed" / "modeling_llama.py").read_text() == "print('hello')"
    (source / "modeling_llama.py").unlink()
    set_config(source, auto_map={"AutoModelForCausalLM": "someone/model--modeling.Model"})
    refused(UserError, source, "auto_map")
    set_config(source, auto_map=None, model_type="gpt2")
    refused(UserError, source, "model_type 'gpt2' is not supported")
    set_config(source, model_type="llama")
    (source / "adapter_config.json").write_text("{}")
    refused(UserError, source, "holds an adapter")


def test_heads_that_do_not_divide(source: Path) -> None:
    set_config(source, num_key_value_heads=3)
    refused(UserError, source, "num_attention_heads 4 is no multiple of num_key_value_heads 3")


def test_a_head_of_its_own_in_a_tied_model(source: Path) -> None:
    set_config(source, tie_word_embeddings=True)
    refused(UserError, source, "lm_head.weight are the same tensor by config.json, but differ")


def test_an_output_folder_that_is_not_empty(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(source, out, PLAIN, Silent())  # an empty one will do
    with pytest.raises(UserError, match="already there and not empty"):
        export_checkpoint(source, out, Options(restart=True), Silent())
    assert_same_weights(out, source)


def test_an_output_folder_inside_of_the_source(source: Path) -> None:
    before = sorted(source.iterdir())
    with pytest.raises(UserError, match="lies inside of the source"):
        export_checkpoint(source, source / "deeper" / "out", PLAIN, Silent())
    assert sorted(source.iterdir()) == before


def test_a_disk_that_is_too_small(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    refused(OutOfResources, source, r"\d\d\d,\d\d\d bytes are needed, its disk has 1,000 left")


def test_a_memory_limit_that_is_too_small_names_the_least(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OutOfResources, match="least that works is") as error:
        export_checkpoint(source, tmp_path / "out", Options(memory_limit=10), Silent())
    least = int(str(error.value).split()[-1])
    with pytest.raises(OutOfResources):
        export_checkpoint(source, tmp_path / "out", Options(memory_limit=least - 1), Silent())
    export_checkpoint(source, tmp_path / "out", Options(memory_limit=least), Silent())
    assert_same_weights(tmp_path / "out", source)


def test_paths_that_hold_no_weights(source: Path, tmp_path: Path) -> None:
    refused(UserError, tmp_path / "nothing", "does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(UserError, empty, "it has no config.json")
    (empty / "latest_checkpointed_iteration.txt").write_text("7")
    refused(UserError, empty, "iter_0000007, which is not there")
    (empty / "latest_checkpointed_iteration.txt").write_text("../..")
    refused(UserError, empty, "expected a number or 'release'")
    import_checkpoint(source, tmp_path / "dist", PLAIN, Silent())
    shutil.rmtree(tmp_path / "dist" / "hf")
    refused(UserError, tmp_path / "dist", "pass --reference")
    refused(UserError, tmp_path / "dist", "--reference .* has no config.json", Options(reference=empty))


def test_nothing_is_written_before_all_is_checked(source: Path, tmp_path: Path) -> None:
    rewrite(source, lambda t: t.pop(UP))
    told = Told()
    with pytest.raises(NamesDiffer):
        export_checkpoint(source, tmp_path / "deep" / "out", PLAIN, told)
    assert not (tmp_path / "deep").exists()
    assert told.total == 0
