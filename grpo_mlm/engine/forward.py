"""Micro-batches through megatron-core's pipeline schedules: to log-probs, or to a loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from grpo_mlm.data.microbatch import PackedSequences
from grpo_mlm.engine.layers import Layers
from grpo_mlm.engine.model import head_weight
from grpo_mlm.kernels.linear_logprobs import linear_logprobs

Loss = Callable[[Tensor, Tensor, PackedSequences], tuple[Tensor, Any]]
"""(log-probs [R], entropies [R], micro-batch) -> (its share of the loss, what the caller wants back)."""


@dataclass(frozen=True)
class Head:
    """From hidden states to the log-probs of response tokens; used on the last pipeline stage."""

    model: GPTModel
    temperature: float
    vocab_size: int  # rows past it are padding, or unknown to the tokenizer, and enter no softmax
    chunk_bytes: int
    group: dist.ProcessGroup | None

    def __call__(self, hidden: Tensor, pack: PackedSequences) -> tuple[Tensor, Tensor]:
        """hidden `[1, T, H]` -> log-probs and entropies, float32 `[R]`."""
        if len(pack.rows) == 0:
            # Nothing to score, but the backward pass still has to go through the model.
            nothing = hidden.flatten()[:0].float()
            return nothing, nothing
        return linear_logprobs(
            hidden[0].index_select(0, pack.rows.to(hidden.device)),
            head_weight(self.model),
            pack.targets.to(hidden.device),
            self.temperature,
            self.vocab_size,
            self.chunk_bytes,
            self.group,
        )


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of one rank's model."""

    model: DistributedDataParallel
    layers: Layers
    head: Head
    device: torch.device

    @torch.no_grad()
    def score(self, packs: Sequence[PackedSequences]) -> list[tuple[Tensor, Tensor]]:
        """(log-probs, entropies) of each micro-batch on the last stage, an empty list on the others."""

        def collect(pack: PackedSequences, hidden: Tensor, non_loss_data: bool) -> tuple[Tensor, Tensor]:
            return self.head(hidden, pack)

        self.model.eval()
        return self._run(packs, collect, forward_only=True)

    def accumulate_gradients(self, packs: Sequence[PackedSequences], loss: Loss) -> list[Any]:
        """The loss's gradient, summed over micro-batches and data-parallel ranks, in the model's buffers.

        Returns what `loss` gave back for each micro-batch on the last stage, an empty list on the others.
        """

        def micro_loss(pack: PackedSequences, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, extra = loss(*self.head(hidden, pack), pack)
            # The schedule adds up a number of tokens to average by; nothing is averaged here.
            return value, torch.zeros((), dtype=torch.int32, device=self.device), extra

        self.model.train()
        self.model.zero_grad_buffer()
        return self._run(packs, micro_loss, forward_only=False)

    def _run(
        self, packs: Sequence[PackedSequences], on_last_stage: Callable[..., Any], forward_only: bool
    ) -> list[Any]:
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward, on_last_stage),
            data_iterator=iter(packs),
            model=self.model,
            num_microbatches=len(packs),
            seq_length=1,  # unused: shapes travel with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward(
        self, on_last_stage: Callable[..., Any], packs: Iterator[PackedSequences], model: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        pack = next(packs)
        hidden = model(
            pack.tokens[None].to(self.device),
            pack.position_ids[None].to(self.device),
            None,
            packed_seq_params=self.layers.packed(pack),
        )
        return hidden, partial(on_last_stage, pack)
