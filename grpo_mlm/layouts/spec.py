"""What the layouts and the engines need to know of a model, whatever its family calls it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base, and how it is stretched over long contexts.

    `scaling` is None for the plain one, else a dict with `rope_type` ("linear" or "llama3") and its numbers:
    `factor`, and for llama3 `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`.
    """

    theta: float
    scaling: dict[str, Any] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class Moe:
    """A mixture of experts in place of a layer's MLP: each token goes to `top_k` of `experts` MLPs of width `ffn`.

    `norm_topk_prob`: the weights of the chosen experts are normalised to sum to 1. `shared_ffn`: width of the MLP that
    every token goes through besides, 0 for none. `dense_layers`: so many layers at the beginning keep an ordinary MLP.
    `expert_bias`: the router has a bias that counts in the choice of experts only. It is steered by how many tokens
    each expert gets, not by gradients, in steps too small for bf16.
    """

    experts: int
    top_k: int
    ffn: int
    norm_topk_prob: bool
    shared_ffn: int = 0
    dense_layers: int = 0
    expert_bias: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and switches of a decoder, as its config.json states them.

    `head_dim` need not be `hidden_size / heads`. `vocab_size` is the number of embedding rows, which may
    exceed the tokenizer's. `tied`: the head is the embedding. Biases: `qkv_bias` on q, k and v, `o_bias` on
    the attention output. `qk_norm`: q and k are normalised head by head. `moe`: None where the MLPs are dense.
    """

    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    norm_eps: float
    rope: Rope
    max_position_embeddings: int
    moe: Moe | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return self.moe is not None and layer >= self.moe.dense_layers
