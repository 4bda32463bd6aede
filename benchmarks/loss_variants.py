"""Ways from hidden states to a loss and its gradients. Each takes a problem and leaves the gradients in its leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.loss_problem import MIB, SAMPLES, Problem
from grpo_mlm.errors import UserError
from grpo_mlm.kernels.fused_linear_grpo import fused_linear_grpo
from grpo_mlm.kernels.linear_logprobs import linear_logprobs

Variant = Callable[[Problem], None]
SMALL_BUDGET = 25 * MIB
FLOOR_ROWS = 128


def _logits_to_loss(hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
    """With the entropy, as a metric: all of ours have it."""
    logp = torch.log_softmax(hidden @ weight.T, dim=1)
    chosen = logp.gather(1, problem.targets[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(1)
    return _loss(problem, chosen, entropy)


def _loss(problem: Problem, logprobs: Tensor, entropy: Tensor) -> Tensor:
    return problem.loss(logprobs, entropy, torch.arange(len(logprobs)))[0].sum()


def naive(problem: Problem) -> None:
    _logits_to_loss(problem.hidden, problem.weight, problem).backward()


@cache
def _compiled() -> Callable[[Tensor, Tensor, Problem], Tensor]:
    return torch.compile(_logits_to_loss)


def compiled(problem: Problem) -> None:
    _compiled()(problem.hidden, problem.weight, problem).backward()


def recompute(problem: Problem) -> None:
    """Our own log-probs under autograd: the logits are made again in the backward pass."""
    made = linear_logprobs(
        problem.hidden, problem.weight, problem.targets, 1.0, len(problem.weight), problem.budget
    )
    _loss(problem, *made).backward()


def fused(problem: Problem, budget: int | None = None) -> None:
    """Masked rows leave before the call, as the engine has it."""
    kept = problem.kept
    everything = len(kept) == len(problem.hidden)
    fused_linear_grpo(
        problem.hidden if everything else problem.hidden[kept],
        problem.weight,
        problem.targets[kept],
        lambda logprobs, entropy, rows: problem.loss(logprobs, entropy, kept[rows]),
        1.0,
        len(problem.weight),
        budget or problem.budget,
        entropy_grad=False,
    ).loss.backward()


@torch.no_grad()
def floor(problem: Problem) -> None:
    """The three products and nothing else."""
    hidden, weight = problem.hidden, problem.weight
    logits = torch.empty(min(FLOOR_ROWS, len(hidden)), len(weight))
    hidden.grad, weight.grad = torch.empty_like(hidden), torch.zeros_like(weight)
    for begin in range(0, len(hidden), FLOOR_ROWS):
        rows = slice(begin, begin + FLOOR_ROWS)
        chunk = logits[: len(hidden[rows])]
        torch.mm(hidden[rows], weight.T, out=chunk)
        torch.mm(chunk, weight, out=hidden.grad[rows])
        weight.grad.addmm_(chunk.T, hidden[rows])


@cache
def _liger() -> Callable[..., tuple[Tensor, ...]]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    return LigerFusedLinearGRPOLoss(beta=0.05, use_ref_model=True, loss_type="dapo", compiled=True)


def liger(problem: Problem) -> None:
    """One response a chunk, its default. It gives no entropy."""
    tokens, samples = problem.tokens, (SAMPLES, -1)
    loss, *_ = _liger()(
        problem.hidden.view(*samples, problem.hidden.shape[1]),
        problem.weight,
        problem.targets.view(samples),
        tokens.weights.view(samples) > 0,
        tokens.advantages.view(samples)[:, 0],
        ref_per_token_logps=tokens.ref_logprobs.view(samples),
        old_per_token_logps=tokens.old_logprobs.view(samples),
    )
    loss.backward()


def liger_is_there() -> bool:
    try:
        _liger()
    except ImportError:
        return False
    return True


VARIANTS: dict[str, Variant] = {
    "naive autograd": naive,
    "torch.compile of it": compiled,
    "Liger chunked": liger,
    "ours, recompute": recompute,
    "ours, single pass": fused,
    "ours, 25 MiB": partial(fused, budget=SMALL_BUDGET),
    "three products": floor,
}
SKIPPING = "ours, 64% kept, 40% live"


def variant(name: str) -> Variant:
    if name == SKIPPING:
        return fused
    if name not in VARIANTS:
        raise UserError(f"no variant {name!r} of the loss; there are {', '.join([*VARIANTS, SKIPPING])}")
    return VARIANTS[name]
