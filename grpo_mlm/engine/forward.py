"""Micro-batches through megatron-core's pipeline schedules: to log-probs, or to a loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from grpo_mlm.engine.attention import packed_segments
from grpo_mlm.engine.device import Device
from grpo_mlm.engine.model import head_weight
from grpo_mlm.kernels.linear_logprobs import linear_logprobs

Loss = Callable[[Tensor, Tensor, PackedSequences], tuple[Tensor, Any]]
"""(log-probs [R], entropy [R], micro-batch) -> (loss of the micro-batch, whatever the caller wants back)."""


@dataclass(frozen=True)
class Head:
    """From hidden states to log-probs of the response tokens; lives on the last pipeline stage."""

    model: GPTModel
    temperature: float
    vocab_size: int  # rows past it are padding and enter no softmax
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


@torch.no_grad()
def score(
    model: DistributedDataParallel, head: Head, packs: Sequence[PackedSequences], device: Device
) -> list[tuple[Tensor, Tensor]]:
    """(log-probs, entropies) of each micro-batch on the last stage, an empty list on the others."""

    def collect(pack: PackedSequences, hidden: Tensor, non_loss_data: bool) -> tuple[Tensor, Tensor]:
        return head(hidden, pack)

    model.eval()
    return _run(model, packs, device, collect, forward_only=True)


def accumulate_gradients(
    model: DistributedDataParallel, head: Head, packs: Sequence[PackedSequences], device: Device, loss: Loss
) -> list[Any]:
    """Sum the loss's gradients over all micro-batches and data-parallel ranks into the model's buffers.

    Returns what `loss` gave back for each micro-batch, on the last stage; an empty list on the others.
    """

    def micro_loss(pack: PackedSequences, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        value, extra = loss(*head(hidden, pack), pack)
        # The schedule adds up a number of tokens for averaging; nothing is averaged here.
        return value, torch.zeros((), dtype=torch.int32, device=hidden.device), extra

    model.train()
    model.zero_grad_buffer()
    return _run(model, packs, device, micro_loss, forward_only=False)


def _run(
    model: DistributedDataParallel,
    packs: Sequence[PackedSequences],
    device: Device,
    last_stage: Callable[..., Any],
    forward_only: bool,
) -> list[Any]:
    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        pack = next(iterator)
        where = device.torch_device
        hidden = model(
            pack.tokens[None].to(where),
            pack.position_ids[None].to(where),
            None,
            packed_seq_params=packed_segments(pack.cu_seqlens, where),
        )
        return hidden, partial(last_stage, pack)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(packs),
        model=model,
        num_microbatches=len(packs),
        seq_length=1,  # unused: shapes travel with the tensors (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
