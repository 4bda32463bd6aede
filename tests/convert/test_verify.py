"""`verify` finds what differs, says where, and passes what is equal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.convert.command import LLAMA, QWEN3, convert, edited, make_model

GATE = "model.layers.1.mlp.gate_proj.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    out = model.with_name("megatron")
    assert convert("import", model, out, "--quiet").code == 0
    return out


def mismatch(a: Path, b: Path, *args: str) -> dict[str, Any]:
    """The one mismatch that the comparison finds."""
    done = convert("verify", a, b, "--json", *args)
    assert done.code == 4, done.err
    assert done.json["equal"] is False
    [one] = done.json["mismatches"]
    return one


@pytest.mark.parametrize("memory", ["512MiB", "8KB"])
def test_a_flipped_bit(model: Path, checkpoint: Path, tmp_path: Path, memory: str) -> None:
    """Against both formats; with little memory a tensor is compared in many blocks."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE].view(torch.int32)[17, 5] ^= 1

    other = edited(model, tmp_path / "other", edit=edit)
    for a in (model, checkpoint):
        one = mismatch(a, other, "--memory-limit", memory)
        assert one["tensor"] == GATE
        assert one["differing"] == 1
        assert one["first_index"] == [17, 5]
        assert int(one["first_a"]["bits"], 16) ^ int(one["first_b"]["bits"], 16) == 1
        assert 0 < one["max_abs_difference"] < 1e-6
    text = convert("verify", checkpoint, other).out
    assert GATE in text
    assert "first at [17, 5]" in text


def test_swapped_rows(model: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_PROJ] = tensors[Q_PROJ][[0, 2, 1, *range(3, 32)]].contiguous()
        expected.append(tensors[Q_PROJ])

    expected: list[torch.Tensor] = []
    other = edited(model, tmp_path / "other", edit=edit)
    one = mismatch(model, other)
    assert (one["tensor"], one["differing"], one["first_index"]) == (Q_PROJ, 64, [1, 0])
    gap = (expected[0][1] - expected[0][2]).abs().max()
    assert one["max_abs_difference"] == pytest.approx(float(gap), rel=1e-6)


def test_nans_compare_by_their_bits(model: Path, tmp_path: Path) -> None:
    def with_nan(bits: int) -> Any:
        def edit(tensors: dict[str, torch.Tensor]) -> None:
            tensors[GATE].view(torch.int32)[3, 4] = bits

        return edit

    a = edited(model, tmp_path / "a", edit=with_nan(0x7FC00001))
    same = edited(model, tmp_path / "same", edit=with_nan(0x7FC00001))
    other = edited(model, tmp_path / "other", edit=with_nan(0x7FC00002))
    assert convert("verify", a, same).code == 0
    one = mismatch(a, other)
    assert (one["first_index"], one["not_finite"], one["max_abs_difference"]) == ([3, 4], 1, None)
    assert one["first_a"] == {"value": "nan", "bits": "0x7fc00001"}
    assert one["first_b"]["bits"] == "0x7fc00002"


def test_minus_zero_is_not_zero(model: Path, tmp_path: Path) -> None:
    def edit(value: float) -> Any:
        return lambda tensors: tensors[GATE][0, :1].fill_(value)

    a = edited(model, tmp_path / "a", edit=edit(0.0))
    one = mismatch(a, edited(model, tmp_path / "b", edit=edit(-0.0)))
    assert (one["differing"], one["max_abs_difference"]) == (1, 0.0)


def test_a_missing_tensor_is_3_whichever_side_it_is_on(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = edited(model, tmp_path / "other", edit=lambda tensors: tensors.pop(Q_PROJ))
    for a, b, key in ((checkpoint, other, "only_in_a"), (other, checkpoint, "only_in_b")):
        done = convert("verify", a, b, "--json")
        assert done.code == 3
        assert done.json[key] == [Q_PROJ]
        assert done.json["mismatches"] == []
        assert Q_PROJ in convert("verify", a, b).out


def test_a_missing_tensor_and_a_changed_one_are_both_told(model: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[Q_PROJ]
        tensors[GATE] += 1

    done = convert("verify", model, edited(model, tmp_path / "other", edit=edit), "--json")
    assert done.code == 3
    assert [one["tensor"] for one in done.json["mismatches"]] == [GATE]
    assert "1 differ" in done.err


def test_a_tensor_that_is_no_part_of_the_model_is_not_passed_over(model: Path, tmp_path: Path) -> None:
    odd = edited(model, tmp_path / "odd", edit=lambda tensors: tensors.update(strange=torch.zeros(1)))
    for a, b in ((model, odd), (odd, model), (odd, odd)):
        done = convert("verify", a, b, "--json")
        assert done.code == 3
        assert (done.json["equal"], done.json["not_compared"]) == (False, ["strange"])
    done = convert("verify", model, odd, "--allow-missing", "strange", "--json")
    assert done.code == 0
    assert (done.json["equal"], done.json["not_compared"], done.json["allowed"]) == (True, [], ["strange"])


def test_a_tensor_that_neither_side_has(model: Path, tmp_path: Path) -> None:
    short = edited(model, tmp_path / "short", edit=lambda tensors: tensors.pop(Q_PROJ))
    done = convert("verify", short, short, "--json")
    assert (done.code, done.json["not_compared"]) == (3, [Q_PROJ])
    again = tmp_path / "again"
    assert convert("export", short, again, "--allow-missing", Q_PROJ, "--verify", "full").code == 0
    assert convert("verify", short, again, "--allow-missing", "*.q_proj.*").code == 0
    assert convert("verify", model, again, "--allow-missing", "*.q_proj.*").code == 0


def test_another_depth_and_another_shape(model: Path, tmp_path: Path) -> None:
    deeper = make_model(tmp_path / "deeper", QWEN3 | {"num_hidden_layers": 3})
    done = convert("verify", model, deeper, "--json")
    assert done.code == 3
    assert len(done.json["only_in_b"]) == 11  # 4 norms, q, k, v, o, gate, up, down
    wider = make_model(tmp_path / "wider", QWEN3 | {"intermediate_size": 64})
    done = convert("verify", model, wider, "--json")
    assert done.code == 4
    gate = next(one for one in done.json["mismatches"] if one["tensor"] == GATE)
    assert (gate["shape_a"], gate["shape_b"], gate["first_index"]) == ([48, 32], [64, 32], None)
    assert "shape [48, 32] in A, [64, 32] in B" in convert("verify", model, wider).out


def test_a_tied_head_that_is_written_out(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    written = edited(model, tmp_path / "written", edit=lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    untied = edited(written, tmp_path / "untied", tie_word_embeddings=False)
    for other in (written, untied):
        for a, b in ((model, other), (other, checkpoint), (written, other)):
            assert convert("verify", a, b).code == 0
    wrong = edited(written, tmp_path / "wrong", edit=lambda t: t[HEAD][69, 31].add_(1))
    for a, b in ((model, wrong), (wrong, checkpoint)):
        done = convert("verify", a, b, "--json")
        assert done.code == 4
        [one] = done.json["mismatches"]
        assert [HEAD] in (one["stored_a"], one["stored_b"])
        assert one["first_index"] == [69, 31]


def test_two_untied_heads_are_compared_with_each_other(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", LLAMA)
    one = mismatch(model, edited(model, tmp_path / "other", edit=lambda t: t[HEAD][0, 0].add_(1)))
    assert one["tensor"] == HEAD


def test_wider_values_are_equal_if_nothing_was_rounded(tmp_path: Path) -> None:
    narrow = make_model(tmp_path / "bf16", dtype=torch.bfloat16)
    wide = tmp_path / "fp32"
    assert convert("export", narrow, wide, "--dtype", "float32").code == 0
    done = convert("verify", narrow, wide, "--json")
    assert done.code == 0
    assert len(done.json["other_dtype"]) == done.json["compared_tensors"]
    assert done.json["other_dtype"][0].items() >= {"dtype_a": "bfloat16", "dtype_b": "float32"}.items()
    assert "equal in value" in convert("verify", narrow, wide).out


def test_rounding_is_a_mismatch_unless_allowed(model: Path, tmp_path: Path) -> None:
    half = tmp_path / "fp16"
    assert convert("export", model, half, "--dtype", "float16").code == 0
    done = convert("verify", model, half)
    assert done.code == 4
    assert "--allow-rounding" in done.err
    assert convert("verify", half, model, "--allow-rounding").code == 0

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE].view(torch.int16)[0, 0] ^= 1

    wrong = edited(half, tmp_path / "wrong", edit=edit)
    one = mismatch(model, wrong, "--allow-rounding")
    assert one["tensor"] == GATE
    assert one["only_rounded"] is False


def test_counts_and_differences_against_numpy(model: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        before.append(tensors[GATE].numpy().copy())
        tensors[GATE] += torch.linspace(-1, 1, 48 * 32).view(48, 32).relu()
        after.append(tensors[GATE].numpy().copy())

    before: list[np.ndarray] = []
    after: list[np.ndarray] = []
    one = mismatch(model, edited(model, tmp_path / "other", edit=edit), "--memory-limit", "4KB")
    different = before[0].view(np.int32) != after[0].view(np.int32)
    assert one["differing"] == different.sum()
    assert tuple(one["first_index"]) == tuple(np.argwhere(different)[0])
    gap = np.abs(before[0].astype(np.float64) - after[0].astype(np.float64)).max()
    assert one["max_abs_difference"] == gap


def test_logits_of_equal_and_of_different_weights(tmp_path: Path) -> None:
    from grpo_mlm.small_models.tiny import make_qwen3

    make_qwen3(tmp_path / "model")
    assert convert("import", tmp_path / "model", tmp_path / "megatron").code == 0
    done = convert("verify", tmp_path / "model", tmp_path / "megatron", "--logits", "--json")
    assert done.code == 0
    assert done.json["logits"]["max_abs_difference"] == 0.0
    assert done.json["logits"]["largest_logit"] > 1
    rounded = ("export", tmp_path / "megatron", tmp_path / "bf16", "--dtype", "bfloat16")
    assert convert(*rounded).code == 0
    compare = ("verify", tmp_path / "model", tmp_path / "bf16", "--allow-rounding", "--logits")
    done = convert(*compare)
    assert done.code == 4
    assert "tolerance 0.0001" in done.err
    assert convert(*compare, "--logits-tolerance", "1.0").code == 0
    short = edited(tmp_path / "model", tmp_path / "short", edit=lambda tensors: tensors.pop(Q_PROJ))
    done = convert("verify", short, short, "--allow-missing", Q_PROJ, "--logits")
    assert done.code == 2
    assert "--logits needs whole models" in done.err


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Experts are fused in transformers' modules, and not in the files."""
    from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

    from grpo_mlm.convert.logits import PROMPT_TOKENS, logits
    from grpo_mlm.convert.open import open_weights

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 70, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "sliding_window": None,
        "max_position_embeddings": 64,
    }  # fmt: skip
    config = (
        MixtralConfig(**sizes, num_local_experts=4)
        if family == "mixtral"
        else Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True)
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.arange(1, PROMPT_TOKENS + 1) * 7919 % 70
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(logits(open_weights(tmp_path / "model")), expected, atol=1e-5, rtol=1e-5)


def test_json_keys_stay(model: Path, tmp_path: Path) -> None:
    other = edited(model, tmp_path / "other", edit=lambda tensors: tensors[GATE][0].zero_())
    found = json.loads(convert("verify", model, other, "--json").out)
    assert found.keys() == {
        "equal", "compared_tensors", "bytes_read", "only_in_a", "only_in_b", "not_compared", "allowed", "mismatches",
        "rounded", "other_dtype",
        "logits",
    }  # fmt: skip
    assert found["mismatches"][0].keys() == {
        "tensor", "stored_a", "stored_b", "dtype_a", "dtype_b", "shape_a", "shape_b", "differing", "first_index",
        "first_a", "first_b", "max_abs_difference", "not_finite", "only_rounded",
    }  # fmt: skip


def test_no_more_is_read_at_a_time_than_the_limit_allows(
    model: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_mlm.bridge.dist_store import DistStore
    from grpo_mlm.bridge.hf_store import HFStore

    sizes: list[int] = []
    for store in (HFStore, DistStore):

        def read(self: Any, name: str, box: Any, original: Any = store.read) -> torch.Tensor:
            sizes.append((part := original(self, name, box)).nbytes)
            return part

        monkeypatch.setattr(store, "read", read)
    limit = 16_384
    assert convert("verify", model, checkpoint, "--memory-limit", f"{limit}B", "--workers", "2").code == 0
    assert 0 < max(sizes) <= limit // 2 // 16
