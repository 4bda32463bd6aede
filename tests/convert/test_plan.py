"""`plan`: what it says of tensors, bytes, padding, ranks and files, against numbers worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.convert.command import FILE, LLAMA, QWEN3_MOE, convert, edited, make_model

# QWEN3: hidden 32, mlp 48, 2 layers, 4 heads of 8, 2 key-value heads, vocabulary 70, tied, float32.
EMBEDDING = 70 * 32
NORMS = 32 + 32 + 8 + 8  # of a layer
LAYER = NORMS + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32
MODEL = EMBEDDING + 2 * LAYER + 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "moe", QWEN3_MOE)


def target(model: Path, text: str, *args: str) -> dict[str, Any]:
    """The one target of a plan, as JSON."""
    done = convert("plan", model, text, "--json", *args)
    assert done.code == 0, done.err
    [one] = done.json["targets"]
    return one


def test_a_megatron_checkpoint(model: Path) -> None:
    one = target(model, "dist")
    assert one["padding_bytes"] == (128 - 70) * 32 * 4
    assert one["bytes"] == MODEL * 4 + one["padding_bytes"]
    assert one["read_bytes"] == MODEL * 4
    assert one["ranks"] == []
    assert sum(one["files"].values()) == one["bytes"]
    rows = {row["tensor"]: row for row in one["tensors"]}
    fc1 = rows["decoder.layers.mlp.linear_fc1.weight"]
    assert (fc1["shape"], fc1["bytes"]) == ([2, 96, 32], 2 * 96 * 32 * 4)
    assert fc1["sources"] == ["model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"]


def test_hugging_face_files_of_another_dtype(model: Path) -> None:
    one = target(model, "hf", "--dtype", "bfloat16", "--max-shard-size", "8KB")
    assert one["bytes"] == MODEL * 2
    assert one["read_bytes"] == MODEL * 4
    assert len(one["files"]) > 1
    assert all(n <= 8000 for n in one["files"].values())
    assert {row["dtype"] for row in one["tensors"]} == {"bfloat16"}


def test_the_plan_is_what_the_conversion_then_does(model: Path, tmp_path: Path) -> None:
    for command, kind in (("export", "hf"), ("import", "dist")):
        planned = target(model, kind, "--max-shard-size", "8KB", "--tensors")
        out = tmp_path / kind
        done = convert(command, model, out, "--max-shard-size", "8KB", "--json")
        assert done.code == 0, done.err
        assert done.json["bytes"] == planned["bytes"]
        assert planned["files"].keys() == {path.name for path in out.glob("*[0-9].*")}
    names = set[str]()
    for path in (tmp_path / "hf").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    assert names == {row["tensor"] for row in target(model, "hf", "--tensors")["tensors"]}


def test_ranks_of_a_trainer(model: Path) -> None:
    """tp 2 x pp 2: each stage has a layer and a copy of the tied embedding, 128 rows a rank with tp 2."""
    one = target(model, "megatron:tp=2,pp=2", "--tensors")
    layer = NORMS + (LAYER - NORMS) // 2
    first, last = layer + 128 * 32, layer + 128 * 32 + 32
    assert [rank["ranks"] for rank in one["ranks"]] == [[0], [1], [2], [3]]
    assert [rank["bytes"] for rank in one["ranks"]] == [4 * first, 4 * first, 4 * last, 4 * last]
    assert [rank["padding_bytes"] for rank in one["ranks"]] == [4 * 32 * n for n in (58, 128, 58, 128)]
    assert one["peak_memory_bytes"] == 4 * last
    assert (one["seconds"], one["files"]) == (None, {})
    output = [row for row in one["tensors"] if row["tensor"] == "output_layer.weight"]
    assert [(row["ranks"], row["sources"]) for row in output] == [
        ([2], ["model.embed_tokens.weight"]),
        ([3], []),
    ]


def test_ranks_of_engines(model: Path) -> None:
    """tp 4 with 2 key-value heads: each is on two ranks. Vocabulary 128 / 4 = 32 rows; two engines share layouts."""
    one = target(model, "vllm:tp=4,replicas=2", "--tensors")
    assert [rank["ranks"] for rank in one["ranks"]] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    each = 32 * 32 + 2 * (NORMS + (8 + 8 + 8) * 32 + 32 * 8 + 3 * 12 * 32) + 32
    assert {rank["bytes"] for rank in one["ranks"]} == {4 * each}
    assert [rank["padding_bytes"] for rank in one["ranks"]] == [0, 0, 4 * 32 * (96 - 70), 4 * 32 * 32]


def test_experts_and_their_ranks(experts: Path) -> None:
    """ep 2 needs two data-parallel ranks, which is what is taken where dp is not given."""
    one = target(experts, "megatron:ep=2,te=true")
    assert [rank["ranks"] for rank in one["ranks"]] == [[0], [1]]
    rows = {row["tensor"]: row for row in one["tensors"]}
    fc1 = rows["decoder.layers.*.mlp.experts.linear_fc1.weight*"]
    assert (fc1["count"], fc1["shape"], fc1["ranks"]) == (2 * 4, [32, 32], [0, 1])
    one = target(experts, "vllm:tp=2,ep=true")
    w13 = next(row for row in one["tensors"] if row["tensor"].endswith("w13_weight"))
    assert (w13["count"], w13["shape"]) == (2 * 2, [2 * 32, 32])


def test_kinds_tensors_and_summary(model: Path) -> None:
    kinds, each = target(model, "hf")["tensors"], target(model, "hf", "--tensors")["tensors"]
    assert len(each) == 2 + 2 * 11
    assert len(kinds) == 2 + 11
    assert sum(row["count"] for row in kinds) == len(each)
    assert sum(row["bytes"] for row in kinds) == sum(row["bytes"] for row in each)
    assert target(model, "hf", "--summary")["tensors"] == []
    text = convert("plan", model, "hf").out
    assert "model.layers.*.mlp.down_proj.weight" in text
    assert "model.layers.1.mlp.down_proj.weight" in convert("plan", model, "hf", "--tensors").out
    assert "down_proj" not in convert("plan", model, "hf", "--summary").out


def test_several_targets_and_sources_of_either_format(model: Path, tmp_path: Path) -> None:
    assert convert("import", model, tmp_path / "megatron").code == 0
    done = convert("plan", tmp_path / "megatron", "hf", "dist", "vllm:tp=2", "--json")
    assert done.code == 0, done.err
    assert done.json["source"]["kind"] == "torch_dist"
    assert [one["bytes"] for one in done.json["targets"][:1]] == [MODEL * 4]
    text = convert("plan", tmp_path / "megatron", "hf", "vllm:tp=2").out
    assert "target hf" in text
    assert "target vllm:tp=2" in text
    assert "an assumption, not measured" in text


def test_names_that_differ_are_3_and_listed(model: Path, tmp_path: Path) -> None:
    norm = "model.norm.weight"
    odd = edited(model, tmp_path / "odd", edit=lambda t: t.update({"[odd]": t.pop(norm)}))
    for text in ("hf", "dist", "megatron:tp=2", "vllm:tp=2"):
        done = convert("plan", odd, text, "--json")
        assert done.code == 3
        assert done.json["names"] == {"missing": [norm], "unexpected": ["[odd]"], "allowed": []}
        assert done.json["targets"][0]["plan_digest"] is None
    done = convert("plan", odd, "hf", "--allow-missing", norm, "--allow-missing", "[[]odd]", "--json")
    assert done.code == 0
    assert done.json["names"] == {"missing": [], "unexpected": [], "allowed": ["[odd]", norm]}
    text = convert("plan", odd, "hf").out
    assert norm in text
    assert "[odd]" in text


def test_reads_headers_only(model: Path, tmp_path: Path) -> None:
    """A file whose data is a hole of the disk is planned like any other."""
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    (hollow / "config.json").write_bytes((model / "config.json").read_bytes())
    content = (model / FILE).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    with (hollow / FILE).open("wb") as file:
        file.write(content[:header])
        file.truncate(len(content))
    of_both = [convert("plan", folder, "dist", "--json").json["targets"] for folder in (model, hollow)]
    assert of_both[0] == of_both[1]


def test_the_estimate_of_time_is_bytes_over_the_assumed_speed(model: Path) -> None:
    done = convert("plan", model, "hf", "--json", "--disk-speed", "1KB")
    assert done.json["assumed_disk_bytes_per_second"] == 1000
    assert done.json["targets"][0]["seconds"] == pytest.approx(2 * MODEL * 4 / 1000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("megatron:tp", "as in tp=2"),
        ("megatron:tp=0", "whole number from 1"),
        ("megatron:tp=two", "whole number from 1"),
        ("megatron:tp=2,tp=2", "given twice"),
        ("megatron:tensor=2", "its keys are tp, pp"),
        ("megatron:replica=2", "has no 'replica'"),
        ("vllm:replica=2", "did you mean replicas?"),
        ("vllm:ep=1", "true or false"),
        ("dist:tp=2", "takes no sizes"),
        ("vlm:tp=2", "did you mean vllm?"),
        ("out/folder", "choose hf, dist"),
        ("megatron:tp=3", "attention heads"),
        ("megatron:pp=3", "number of layers"),
        ("megatron:vpp=2", "pp"),
        ("megatron:ep=2", "no experts"),
        ("vllm:ep=true", "no experts"),
        ("vllm:tp=8", "attention heads"),
    ],
)
def test_targets_that_mean_nothing(model: Path, text: str, said: str) -> None:
    done = convert("plan", model, text)
    assert done.code == 2
    assert said in done.err
    assert repr(text) in done.err


def test_json_keys_stay(model: Path) -> None:
    """Scripts read these; a change of meaning raises format_version."""
    done = json.loads(convert("plan", model, "hf", "vllm:tp=2", "--json").out)
    assert done.keys() == {"format_version", "source", "names", "assumed_disk_bytes_per_second", "targets"}
    assert done["format_version"] == 1
    assert done["source"].keys() == {"path", "kind", "family", "tensors", "bytes", "dtypes", "files"}
    for one in done["targets"]:
        assert one.keys() == {
            "target", "kind", "bytes", "padding_bytes", "read_bytes", "peak_memory_bytes", "seconds", "plan_digest",
            "files", "ranks", "tensors",
        }  # fmt: skip
        assert one["tensors"][0].keys() == {
            "tensor", "count", "ranks", "shape", "dtype", "sources", "bytes", "padding_bytes",
        }  # fmt: skip
    assert done["targets"][1]["ranks"][0].keys() == {"ranks", "tensors", "bytes", "padding_bytes"}


def test_an_untied_head(tmp_path: Path) -> None:
    one = target(make_model(tmp_path / "llama", LLAMA), "dist", "--tensors")
    rows = {row["tensor"]: row for row in one["tensors"]}
    assert rows["output_layer.weight"]["sources"] == ["lm_head.weight"]
