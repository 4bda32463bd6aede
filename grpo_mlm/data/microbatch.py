"""From a batch to packed micro-batches: which samples go together, and the flat tensors of one micro-batch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_mlm.data.batch import RolloutBatch

ATTENTION_LENGTH = 49_152
"""Sequence length at which causal attention costs as much as a layer's matrices: 12 x hidden size, of 4096 here."""


def pack(seq_lens: np.ndarray, indices: np.ndarray, dp: int, max_tokens: int) -> list[list[list[int]]]:
    """`[dp][micro-batch]` -> sample indices. A pure function; what always holds:

    - every index is in exactly one micro-batch;
    - every data-parallel rank has the same number of micro-batches, at least one (some may be empty);
    - a micro-batch holds more than `max_tokens` only if it is one sample;
    - micro-batches are about equally heavy, and the ranks' sums too.

    First fit, longest first, gives the number of micro-batches; it is rounded up to a multiple of `dp`, and the
    samples are dealt again, longest first, each to the lightest micro-batch that has room.
    """
    order = sorted((int(i) for i in indices), key=lambda i: (-seq_lens[i], i))
    fitted = _first_fit(order, seq_lens, max_tokens)
    count = max(1, -(-len(fitted) // dp)) * dp
    bins = _deal(order, seq_lens, max_tokens, count)
    if bins is None:  # dealing evenly can fail where first fit did not; then nearly all of its bins are full
        bins = fitted + [[] for _ in range(count - len(fitted))]
    return _share_out([sorted(b) for b in bins], seq_lens, dp)


def _first_fit(order: list[int], seq_lens: np.ndarray, max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        length = int(seq_lens[i])
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([i])
            room.append(max_tokens - length)
        else:
            bins[place].append(i)
            room[place] -= length
    return bins


def _deal(order: list[int], seq_lens: np.ndarray, max_tokens: int, count: int) -> list[list[int]] | None:
    """Each sample to the lightest of `count` bins; None where one does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in order:
        used, b = heapq.heappop(heap)
        length = int(seq_lens[i])
        if used and used + length > max_tokens:
            return None
        bins[b].append(i)
        heapq.heappush(heap, (used + length, b))
    return bins


def _share_out(bins: list[list[int]], seq_lens: np.ndarray, dp: int) -> list[list[list[int]]]:
    """Bins to ranks, heaviest first, each to the lightest rank that still wants one."""
    per_rank = len(bins) // dp
    cost = [sum(int(seq_lens[i]) * (1 + int(seq_lens[i]) / ATTENTION_LENGTH) for i in b) for b in bins]
    ranks: list[list[list[int]]] = [[] for _ in range(dp)]
    load = [0.0] * dp
    for b in sorted(range(len(bins)), key=lambda b: (-cost[b], b)):
        rank = min((r for r in range(dp) if len(ranks[r]) < per_rank), key=lambda r: (load[r], r))
        ranks[rank].append(bins[b])
        load[rank] += cost[b]
    return ranks


def minibatches(batch: RolloutBatch, prompts: int, epoch: int, seed: int) -> Iterator[np.ndarray]:
    """Sample indices of each optimizer step: `prompts` whole groups at a time, in a new order each epoch.

    The first epoch keeps the batch's order, which the sampler has shuffled already.
    """
    groups = batch.group_id[np.sort(np.unique(batch.group_id, return_index=True)[1])]
    if epoch:
        groups = np.random.default_rng([seed, epoch]).permutation(groups)
    for start in range(0, len(groups), prompts):
        yield np.flatnonzero(np.isin(batch.group_id, groups[start : start + prompts]))


@dataclass(frozen=True)
class PackedSequences:
    """M samples laid end to end, without padding. Response token r is `targets[r]`, predicted at `rows[r]`."""

    tokens: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], from 0 in each sample
    cu_seqlens: Tensor  # int32 [M+1]
    rows: Tensor  # int64 [R]
    targets: Tensor  # int64 [R]
    index: Tensor  # int64 [R], the token's place in the batch's per-token columns


def pack_samples(batch: RolloutBatch, indices: np.ndarray) -> PackedSequences:
    """The flat tensors of one micro-batch; without samples it is one dummy token that nothing scores.

    Inside each sample the token at position t is predicted by position t - 1, so no row looks across samples.
    """
    if len(indices) == 0:
        none, zero = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        return PackedSequences(zero, zero, torch.tensor([0, 1], dtype=torch.int32), none, none, none)
    offsets = batch.cu_responses
    starts = np.concatenate([[0], np.cumsum(batch.seq_lens[indices])])
    tokens, positions, rows, targets, index = [], [], [], [], []
    for start, i in zip(starts, indices, strict=False):
        ids, prompt = batch.sample_tokens(i), int(batch.prompt_lens[i])
        tokens.append(ids)
        positions.append(np.arange(len(ids)))
        rows.append(start + np.arange(prompt - 1, len(ids) - 1))
        targets.append(ids[prompt:])
        index.append(np.arange(offsets[i], offsets[i + 1]))
    return PackedSequences(
        tokens=_flat(tokens),
        position_ids=_flat(positions),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        rows=_flat(rows),
        targets=_flat(targets),
        index=_flat(index),
    )


def _flat(pieces: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(pieces).astype(np.int64))
