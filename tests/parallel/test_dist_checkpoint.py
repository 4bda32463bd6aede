"""Distributed checkpoints: what we write, stock megatron-core loads; what stock megatron-core saves, we read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_mlm.bridge.dist_format import read_index
from grpo_mlm.bridge.dist_store import DistStore
from grpo_mlm.layouts.megatron import MegatronParallel
from grpo_mlm.layouts.megatron_dist import is_model_key
from grpo_mlm.layouts.model import ModelSpec, read_model_spec
from tests.bridge.dist_checkpoint import Tensors, assert_equal, hub_tensors, read_checkpoint, write_checkpoint
from tests.parallel import stock_model

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 100,  # pads to 128, with tensor parallelism to 256
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "vocab_size": 256},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 256, "hidden_size": 64},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1},
    "qwen3_moe": {"model_type": "qwen3_moe", "norm_topk_prob": True} | EXPERTS,
    "mixtral tied": {"model_type": "mixtral", "tie_word_embeddings": True, "sliding_window": None} | EXPERTS,
}
UNEVEN = MegatronParallel(tp=2, pp=2, first_stage_layers=1)
CHUNKS = MegatronParallel(pp=2, vpp=2)
DENSE = [*(MegatronParallel(tp, pp) for tp in (1, 2) for pp in (1, 2)), UNEVEN, CHUNKS]
MOE = [
    MegatronParallel(tp=2),
    MegatronParallel(pp=2, ep=2),
    MegatronParallel(tp=2, ep=2, etp=1),
    MegatronParallel(tp=2, ep=2, etp=2),
    MegatronParallel(tp=2, pp=2, ep=2, etp=1, last_stage_layers=1),
    MegatronParallel(pp=2, vpp=2, ep=2),
]
SAVED = [MegatronParallel(tp=2, pp=2), UNEVEN, CHUNKS, *MOE[2:]]
NUMBERED = {"non_homogeneous_layers": True}
"""What megatron-core is told to store every layer under keys of its own."""


@dataclass(frozen=True)
class Step:
    """What ranks do with one model at one set of parallel sizes: load, compute logits, save."""

    spec: ModelSpec
    source: Path
    tokens: Tensor
    save: Path | None = None
    metadata: dict[str, Any] | None = None
    te_names: bool = False


@dataclass(frozen=True)
class Model:
    """A model in Hugging Face format, and its checkpoints."""

    spec: ModelSpec
    weights: Tensors
    tokens: Tensor
    logits: Tensor
    folder: Path

    def step(self, source: str, save: str | None = None, **how: Any) -> Step:
        return Step(self.spec, self.folder / source, self.tokens, self.folder / save if save else None, **how)


def run_steps(work: list[tuple[MegatronParallel, list[Step]]]) -> list[list[Tensor | None]]:
    """On every rank; logits of each step, on ranks of the last stage of whole models."""
    results: list[list[Tensor | None]] = []
    for par, steps in work:
        with stock_model.groups(par):
            results.append([run_step(par, step) for step in steps])
    return results


def run_step(par: MegatronParallel, step: Step) -> Tensor | None:
    models = stock_model.chunks(step.spec, par, step.te_names)
    stock_model.load(models, step.source, step.metadata)
    if step.save:
        stock_model.save(models, step.save, step.metadata)
    return stock_model.logits(models[0], step.tokens) if par.vpp == 1 else None


def make(name: str, folder: Path) -> Model:
    """Random weights, norms and biases too; our checkpoint of them in `folder / "ours"`."""
    config = AutoConfig.for_model(**(SIZES | MODELS[name]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float("norm" in key), 0.2)
        tokens = torch.randint(0, 100, (2, 11))
        logits = model(tokens).logits
    model.save_pretrained(folder / "hf")
    spec, weights = read_model_spec(folder / "hf"), hub_tensors(folder / "hf")
    write_checkpoint(folder / "ours", spec, weights)
    if spec.moe:
        write_checkpoint(folder / "ours numbered", spec, weights, per_layer=True)
    return Model(spec, weights, tokens, logits, folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {name: make(name, tmp_path_factory.mktemp(name.replace(" ", "_"))) for name in MODELS}


@pytest.fixture(scope="module")
def loaded(models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Tensor]:
    """Logits by model and sizes, or by model and the special way of loading. All ranks run everything once."""
    work: list[tuple[Any, MegatronParallel, Step]] = []
    for name, model in models.items():
        for i, par in enumerate(MOE if model.spec.moe else DENSE):
            work.append(((name, par), par, model.step("ours", f"saved{i}" if par in SAVED else None)))
    moe, par = models["qwen3_moe"], MOE[1]
    work.append((("qwen3_moe", "te"), par, moe.step("ours", "saved te", te_names=True)))
    work.append(
        (("qwen3_moe", "numbered"), par, moe.step("ours numbered", "saved numbered", metadata=NUMBERED))
    )
    by_sizes: dict[MegatronParallel, list[tuple[Any, Step]]] = {}
    for key, par, step in work:
        by_sizes.setdefault(par, []).append((key, step))
    with stock_model.stock_ranks(tmp_path_factory.mktemp("ranks")) as run:
        ranks = run(run_steps, [(par, [step for _, step in steps]) for par, steps in by_sizes.items()])
    keys = [[key for key, _ in steps] for steps in by_sizes.values()]
    return {
        key: result
        for rank in ranks
        for group, results in zip(keys, rank, strict=True)
        for key, result in zip(group, results, strict=True)
        if result is not None
    }


@pytest.mark.parametrize("name", MODELS)
def test_stock_megatron_loads_what_we_write(
    name: str, models: dict[str, Model], loaded: dict[Any, Tensor]
) -> None:
    """CNV-01, CNV-03, CNV-04: at all sizes the logits are those of transformers."""
    reference = models[name].logits
    sizes = [par for par in (MOE if models[name].spec.moe else DENSE) if par.vpp == 1]
    for par in sizes:
        logits = loaded[name, par][..., : reference.shape[-1]]
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=0, msg=f"{name} at {par}")


@pytest.mark.parametrize("name", MODELS)
def test_what_stock_megatron_saves_reads_back_bit_equal(
    name: str, models: dict[str, Model], loaded: dict[Any, Tensor]
) -> None:
    model = models[name]
    folders = sorted(model.folder.glob("saved*"))
    assert len(folders) >= 3
    for folder in folders:
        assert_equal(read_checkpoint(DistStore(folder, model.spec)), model.weights)


@pytest.mark.parametrize("how", ["te", "numbered"])
def test_other_names_for_the_same_weights(
    how: str, models: dict[str, Model], loaded: dict[Any, Tensor]
) -> None:
    """The norm before experts by Transformer Engine's name; layers under keys of their own."""
    model = models["qwen3_moe"]
    reference = model.logits
    logits = loaded["qwen3_moe", how][..., : reference.shape[-1]]
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=0)
    store = DistStore(model.folder / f"saved {how}", model.spec)
    assert_equal(read_checkpoint(store), model.weights)
    name = "decoder.layers.pre_mlp_layernorm.weight" if how == "te" else "decoder.layers.3.mlp.router.weight"
    assert name in store.layout.shapes


def test_layer_specs_disagree_about_the_norm_before_experts(
    models: dict[str, Model], loaded: dict[Any, Tensor]
) -> None:
    """Why we write it twice: neither spec's checkpoint has the name that the other asks for."""
    model = models["qwen3_moe"]
    local, te = (read_index(model.folder / x, is_model_key).keys() for x in ("saved2", "saved te"))
    at = "decoder.layers."
    assert local - te == {at + "mlp.linear_fc1.layer_norm_weight"}
    assert te - local == {at + "pre_mlp_layernorm.weight"}
    assert local | te == read_index(model.folder / "ours", is_model_key).keys()
