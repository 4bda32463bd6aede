"""One trainer process: a rank's part of the actor, what it computes, and the weights that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mlm.bridge import group as bridge_group
from grpo_mlm.bridge.channel import Listener
from grpo_mlm.bridge.export import export_hf
from grpo_mlm.bridge.finite import not_finite
from grpo_mlm.bridge.hf_files import load_layout
from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.microbatch import PackedSequences, pack_samples
from grpo_mlm.engine import parallel
from grpo_mlm.engine.device import open_device
from grpo_mlm.engine.forward import Passes
from grpo_mlm.engine.head import Head
from grpo_mlm.engine.layers import layers_on
from grpo_mlm.engine.loss import StepLoss
from grpo_mlm.engine.model import build_model, data_parallel
from grpo_mlm.engine.optimizer import Optimizer
from grpo_mlm.engine.reference import host_copy, swapped_in
from grpo_mlm.engine.weight_sender import WeightSender
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.known_tokens import known_tokens
from grpo_mlm.layouts.megatron import (
    LOCAL,
    TE,
    Coordinates,
    MegatronParallel,
    Naming,
    megatron_layout,
    megatron_layouts,
)
from grpo_mlm.layouts.model import read_model_spec
from grpo_mlm.telemetry.reduce import Part, merge

Schedule = Sequence[Sequence[Sequence[int]]]
"""[data-parallel rank][micro-batch] -> samples. Every rank has the same number of micro-batches."""


class MegatronEngine:
    """A rank of the trainer. `start` on all ranks makes them one model; from then on every method is called on
    all ranks with the same arguments."""

    def __init__(self, config: Config, model_folder: Path, world: World, rank: int) -> None:
        self.config, self.model_folder, self.world = config, model_folder, world
        self.place = parallel.place_of(world, rank)
        self.spec = read_model_spec(model_folder)
        self.dtype: torch.dtype = getattr(torch, config.actor.dtype)
        self.device = open_device(config.cluster.device)
        self.store: dist.TCPStore | None = None
        self.bridge_store: dist.TCPStore | None = None
        self.listener: Listener | None = None
        self.sender: WeightSender | None = None
        self.ref: dict[str, Tensor] | None = None

    def open_store(self) -> tuple[str, int]:
        """On rank 0, before any `start`: the address at which the ranks meet. This process holds the port."""
        self.store = bridge_group.open_store(parallel.own_address(self.config.cluster.nnodes))
        return self.store.host, self.store.port

    def start(self, host: str, port: int) -> None:
        """Meet the other ranks, build this rank's part of the model, load its weights, make the optimizer."""
        config, actor = self.config, self.config.actor
        timeout = timedelta(seconds=config.cluster.start_timeout_s)
        store = self.store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
        # One replica has nothing to share out, and would pay for copies of all gradients and weights.
        sharded = actor.megatron.use_distributed_optimizer and self.place.dp > 1
        with self.device.active():
            parallel.join(self.device, store, self.place, config.cluster.call_timeout_s)
            layers = layers_on(self.device, self.spec, self.dtype)
            self.gpt = build_model(self.spec, self.place, self.device, layers, self.dtype)
            load_layout(self.model_folder, self.layout(), self.parameters())
            if actor.use_kl_loss or config.algorithm.use_kl_in_reward:
                self.ref = host_copy(self.parameters())
            model = data_parallel(self.gpt, sharded)
            self.optimizer = Optimizer(actor.optim, model, self.device, self.dtype, sharded)
        head = Head(
            self.gpt,
            config.rollout.temperature,
            known_tokens(self.model_folder),
            actor.logits_chunk_mb << 20,
            actor.loss_backend,
            parallel.tensor_group(self.place),
        )
        self.passes = Passes(model, layers, head, self.device.torch_device)

    def parameters(self) -> dict[str, Tensor]:
        """This rank's live weights, by the names of `layout`."""
        return {name: param.detach() for name, param in self.gpt.named_parameters()}

    def layout(self) -> Layout:
        """Which boxes of the model's tensors `parameters` holds."""
        place = self.place
        par = MegatronParallel(place.tp, place.pp)
        return megatron_layout(self.spec, par, Coordinates(place.tp_rank, place.pp_rank), self._naming)

    @property
    def _naming(self) -> Naming:
        return LOCAL if self.device.is_cpu else TE

    def logprobs(
        self, batch: RolloutBatch, schedule: Schedule, which: Literal["actor", "ref"]
    ) -> dict[str, Any] | None:
        """Log-probs and entropies of every scheduled response token, at the rollout's temperature.

        On the rank that answers for its replica: `indices`, the samples in the order of the columns `logprobs`
        and `entropy` (float32, one value a response token). None on the other ranks.
        """
        weights: AbstractContextManager[None] = nullcontext()
        if which == "ref":
            assert self.ref is not None, "no term of this configuration needs a reference"
            weights = swapped_in(dict(self.gpt.named_parameters()), self.ref)
        with self.device.active(), weights:
            rows = self.passes.score(self._packs(batch, schedule))
        if not self.place.reports:
            return None
        logprobs, entropy = (_column(values) for values in zip(*rows, strict=True))
        return {"indices": self._samples(schedule), "logprobs": logprobs, "entropy": entropy}

    def update(
        self, batch: RolloutBatch, schedule: Schedule, weights: np.ndarray, selected: np.ndarray | None = None
    ) -> dict[str, Any]:
        """One optimizer step on the scheduled samples.

        `weights`, float32 `[R]` over the whole batch: each token's share of the loss, with the denominators of the
        whole step in; `selected`, bool `[R]`, the tokens that a covariance loss treats apart. Returns `metrics`; on a
        rank that answers for its replica also `indices` and `logprobs` of the training forward, as `logprobs` does.
        Where all weights are 0 nothing is computed and nothing moves.
        """
        if not weights.any():
            return {"metrics": {"actor/empty_steps": Part("max", 1.0)}}
        actor, correction = self.config.actor, self.config.algorithm.rollout_correction
        loss = StepLoss(actor, correction, batch, weights, selected, self.device.torch_device)
        with self.device.active():
            micros = self.passes.accumulate_gradients(self._packs(batch, schedule), loss)
            step = self.optimizer.step(all(micro.finite for micro in micros))
        if not self.place.reports:
            return {"metrics": {}}
        return {
            "metrics": merge([micro.metrics for micro in micros]) | step.metrics(),
            "indices": self._samples(schedule),
            "logprobs": _column([micro.logprobs for micro in micros]),
        }

    def export_hf(self, folder: Path) -> None:
        """Write the actor as a Hugging Face folder, all ranks together."""
        place = self.place
        par = MegatronParallel(place.tp, place.pp)
        layouts = megatron_layouts(self.spec, par, place.dp, self._naming)
        export_hf(folder, self.model_folder, self.spec, layouts, place.rank, self.parameters())

    def open_bridge(self) -> tuple[str, int]:
        """On rank 0: the address at which the ranks of the joint group meet."""
        self.bridge_store = bridge_group.open_store(parallel.own_address(self.config.cluster.nnodes))
        return self.bridge_store.host, self.bridge_store.port

    def open_handoff(self) -> str:
        """The address at which the engine rank on this device connects, in the `join_bridge` that follows."""
        self.listener = Listener()
        return self.listener.address

    def join_bridge(self, host: str, port: int, shape: SyncShape) -> str:
        """Enter the joint group, anew after a sync that failed; the digest of what will be sent."""
        if self.sender is not None:
            self.sender.leave()
        self.sender = WeightSender(self.config, shape, self.place.rank, self.device, self.layout())
        start_timeout_s = self.config.cluster.start_timeout_s
        self.sender.join(host, port, self.bridge_store, self.listener, start_timeout_s)
        self.listener = None
        return shape.digest

    def not_finite(self) -> list[str]:
        """The tensors, by their Hugging Face names, of which this rank holds a NaN or an infinity."""
        return not_finite(self.layout(), self.parameters())

    def send_weights(self, version: int) -> int:
        """Send the engines the weights as they are now, while they receive; returns the bytes sent."""
        assert self.sender is not None, "join_bridge comes first"
        try:
            return self.sender.send(self.parameters(), version)
        except BaseException:
            self.sender.leave()  # or the others would wait for this rank
            raise

    def close(self) -> None:
        """Leave the process groups."""
        parallel.leave()
        self.store = None

    def _packs(self, batch: RolloutBatch, schedule: Schedule) -> list[PackedSequences]:
        return [
            pack_samples(batch, np.asarray(micro, dtype=np.int64)) for micro in schedule[self.place.dp_rank]
        ]

    def _samples(self, schedule: Schedule) -> list[int]:
        return [int(i) for micro in schedule[self.place.dp_rank] for i in micro]


def _column(pieces: Sequence[Tensor]) -> np.ndarray:
    return torch.cat([piece.float() for piece in pieces]).cpu().numpy()
