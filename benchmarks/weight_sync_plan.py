"""The planner on the shapes of a large model: how long it takes, what it needs, and what it plans."""

from __future__ import annotations

import resource
import time

from benchmarks.models import find_model
from benchmarks.result import Result
from benchmarks.sizes import parse_sizes
from grpo_mlm.layouts.megatron import TE, MegatronParallel, megatron_layouts
from grpo_mlm.layouts.planner import make_plan
from grpo_mlm.layouts.planner.report import report, summary
from grpo_mlm.layouts.vllm import vllm_layout

ITEMSIZE = 2  # bfloat16
TRAIN = {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 0, "dp": 1, "first": 0, "last": 0}
ROLLOUT = {"tp": 1, "ep": 0, "replicas": 1}


def measure(model: str, train: str, rollout: str, tensors: bool = False) -> Result:
    """One row a side; `tensors` adds a line a tensor.

    `train` with etp=0 means that of the rest, first=0 and last=0 an even cut of the layers.
    """
    spec = find_model(model)
    t, r = parse_sizes(train, "--train", TRAIN), parse_sizes(rollout, "--rollout", ROLLOUT)
    par = MegatronParallel(
        t["tp"], t["pp"], t["vpp"], t["ep"], t["etp"] or None, t["first"] or None, t["last"] or None
    )
    began = time.perf_counter()
    sources = megatron_layouts(spec, par, t["dp"], TE)
    engine = [vllm_layout(spec, r["tp"], rank, ep=bool(r["ep"])) for rank in range(r["tp"])]
    laid_out = time.perf_counter()
    plan = make_plan(sources, engine * r["replicas"])
    planned = time.perf_counter()
    numbers = summary(plan, ITEMSIZE)
    sides = (
        ("trainer: sent", "sources", "egress_bytes"),
        ("engines: received", "destinations", "ingress_bytes"),
    )
    rows = [
        {
            "side": side,
            "ranks": numbers[ranks],
            "total bytes": numbers["bytes"],
            "least bytes a rank": numbers[spread]["min"],
            "most bytes a rank": numbers[spread]["max"],
            "most / mean": numbers[spread]["max_over_mean"],
        }
        for side, ranks, spread in sides
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    notes = [
        f"{model}, bfloat16, from {train} to {rollout}",
        f"layouts {laid_out - began:.2f} s, plan {planned - laid_out:.2f} s, peak memory {peak / 1e9:.2f} GB",
        *report(plan, ITEMSIZE, most_pairs=0, tensors=tensors),
    ]
    return Result("weight_sync_plan", rows, notes)
