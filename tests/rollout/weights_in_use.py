"""What a vLLM worker computes with, read back through its own kernels, and the same slices cut by hand.

On a CPU the weights of linear layers live packed inside a kernel's handle; the layer's answer to the identity
matrix is the transposed weight, exactly. Experts are packed in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def weights_in_use(worker: Any) -> dict[str, Tensor]:
    """Runs inside each worker: local weights `[out, in]` by vLLM's names, the head's too where it is tied.

    Experts come as the kernel has packed them; two engines can be compared by them.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, module in worker.model_runner.get_model().named_modules():
            if isinstance(module, LinearBase):
                width = getattr(module, "input_size_per_partition", module.input_size)
                found[name] = module.quant_method.apply(module, torch.eye(width)).T.contiguous()
            elif isinstance(module, ParallelLMHead):
                found[name] = module.quant_method.apply(
                    module, torch.eye(module.embedding_dim)
                ).T.contiguous()
            elif isinstance(module, RoutedExperts):
                found |= {f"{name}.{leaf}": param.clone() for leaf, param in module.named_parameters()}
            elif isinstance(module, VocabParallelEmbedding) or "norm" in name:
                found[name] = module.weight.detach().clone()
    return found


def slices_by_hand(hf: dict[str, Tensor], layers: int, tp: int, rank: int) -> dict[str, Tensor]:
    """One rank's weights cut from the tensors of a Hugging Face file; more key-value heads than ranks."""

    def rows(name: str) -> Tensor:
        return hf[f"{name}.weight"].chunk(tp, dim=0)[rank]

    def columns(name: str) -> Tensor:
        return hf[f"{name}.weight"].chunk(tp, dim=1)[rank]

    def vocabulary(name: str) -> Tensor:
        table = hf[f"{name}.weight"]
        padding = table.new_zeros(-len(table) % 64, table.shape[1])
        return torch.cat([table, padding]).chunk(tp, dim=0)[rank]

    embedding, head = "model.embed_tokens", "lm_head"
    cut = {embedding: vocabulary(embedding), "model.norm": hf["model.norm.weight"]}
    cut[head] = vocabulary(head if f"{head}.weight" in hf else embedding)
    for layer in range(layers):
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        cut[f"{at}.qkv_proj"] = torch.cat([rows(f"{at}.{part}_proj") for part in "qkv"])
        cut[f"{at}.o_proj"] = columns(f"{at}.o_proj")
        cut[f"{mlp}.gate_up_proj"] = torch.cat([rows(f"{mlp}.gate_proj"), rows(f"{mlp}.up_proj")])
        cut[f"{mlp}.down_proj"] = columns(f"{mlp}.down_proj")
    norms = (name for name in hf if name.startswith("model.layers") and name.endswith("norm.weight"))
    return cut | {name.removesuffix(".weight"): hf[name] for name in norms}
