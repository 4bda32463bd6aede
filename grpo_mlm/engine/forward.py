"""Micro-batches through megatron-core's pipeline schedules: to log-probs, or to a loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from grpo_mlm.data.microbatch import PackedSequences
from grpo_mlm.engine.head import Head
from grpo_mlm.engine.layers import Layers

Loss = Callable[[Head, Tensor, PackedSequences], tuple[Tensor, Any]]
"""(head, hidden states [1, T, H], micro-batch) -> (its share of the loss, what the caller wants back)."""


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
            return self.head.logprobs(hidden, pack.rows, pack.targets)

        self.model.eval()
        return self._run(packs, collect, forward_only=True)

    def accumulate_gradients(self, packs: Sequence[PackedSequences], loss: Loss) -> list[Any]:
        """The loss's gradient, summed over micro-batches and data-parallel ranks, in the model's buffers.

        Returns what `loss` gave back for each micro-batch on the last stage, an empty list on the others.
        """

        def micro_loss(pack: PackedSequences, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, extra = loss(self.head, hidden, pack)
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
