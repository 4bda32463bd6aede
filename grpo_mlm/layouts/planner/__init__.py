"""Joins two sets of layouts to a plan: who sends which box to whom."""

from grpo_mlm.layouts.planner.copies import Copy, buckets
from grpo_mlm.layouts.planner.make import PlanError, make_plan
from grpo_mlm.layouts.planner.plan import Plan

__all__ = ["Copy", "Plan", "PlanError", "buckets", "make_plan"]
