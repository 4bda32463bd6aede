"""The plan of the weight sync. Trainer and engines build it on their own and compare digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.megatron import LOCAL, TE, MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import read_model_spec
from grpo_mlm.layouts.planner import Plan, make_plan
from grpo_mlm.layouts.vllm import vllm_layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SyncShape:
    """All that the plan depends on; plain values, so that it crosses processes."""

    model_folder: str
    tp: int
    pp: int
    dp: int
    te: bool  # whether the trainer uses Transformer Engine's names
    rollout_tp: int
    num_engines: int

    def plan(self) -> Plan:
        """Trainer ranks in Megatron's order are the sources, engine ranks in order the destinations."""
        spec = read_model_spec(Path(self.model_folder))
        sources = megatron_layouts(spec, MegatronParallel(self.tp, self.pp), self.dp, TE if self.te else LOCAL)
        engine = [vllm_layout(spec, self.rollout_tp, rank) for rank in range(self.rollout_tp)]
        return make_plan(sources, engine * self.num_engines)


def check_shapes(planned: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """RunFailure listing every name or shape on which the plan and the engine's live model differ."""
    faults = [f"{name}: in the engine, not in the plan" for name in sorted(expected.keys() - planned.keys())]
    faults += [f"{name}: in the plan, not in the engine" for name in sorted(planned.keys() - expected.keys())]
    faults += [
        f"{name}: {planned[name]} planned, {expected[name]} in the engine"
        for name in sorted(planned.keys() & expected.keys())
        if planned[name] != expected[name]
    ]
    if faults:
        raise RunFailure("the engine's weights are not those of the plan:\n  " + "\n  ".join(faults[:20]))
