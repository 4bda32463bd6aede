"""From hidden states to log-probs and to the loss; used on the last pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from grpo_mlm.engine.model import head_weight
from grpo_mlm.kernels.backends import Backend
from grpo_mlm.kernels.fused_linear_grpo import LossFn, fused_linear_grpo
from grpo_mlm.kernels.linear_logprobs import linear_logprobs


@dataclass(frozen=True)
class Head:
    """The output matrix with what its softmax needs. Hidden states are `[1, T, H]`, of which `rows` `[R]` are scored
    against `targets` `[R]`."""

    model: GPTModel
    temperature: float
    vocab_size: int  # rows past it are padding, or unknown to the tokenizer, and enter no softmax
    chunk_bytes: int
    backend: Backend
    group: dist.ProcessGroup | None

    def logprobs(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, float32 `[R]`, differentiable."""
        if len(rows) == 0:
            return _nothing(hidden), _nothing(hidden)
        return linear_logprobs(
            hidden[0].index_select(0, rows.to(hidden.device)),
            head_weight(self.model),
            targets.to(hidden.device),
            self.temperature,
            self.vocab_size,
            self.chunk_bytes,
            self.group,
            self.backend,
        )

    def loss(
        self, hidden: Tensor, rows: Tensor, targets: Tensor, loss_fn: LossFn, entropy_grad: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum of `loss_fn` over the rows, whose gradients are made in this very pass; the rows' log-probs; and
        what `loss_fn` reported of each."""
        if len(rows) == 0:
            nothing = _nothing(hidden)
            values, report = loss_fn(nothing, nothing, rows.to(hidden.device))
            return values.sum(), nothing, report
        weight = head_weight(self.model)
        fused = fused_linear_grpo(
            hidden[0].index_select(0, rows.to(hidden.device)),
            weight,
            targets.to(hidden.device),
            loss_fn,
            self.temperature,
            self.vocab_size,
            self.chunk_bytes,
            self.group,
            self.backend,
            entropy_grad=entropy_grad,
            main_grad=getattr(weight, "main_grad", None),
        )
        return fused.loss, fused.logprobs, fused.report


def _nothing(hidden: Tensor) -> Tensor:
    """Nothing to score, but the backward pass still has to go through the model."""
    return hidden.flatten()[:0].float()
