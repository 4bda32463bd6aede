"""Executes a plan: packed buckets from rank to rank, never a full tensor.

Every rank works through its own buckets in the order that all ranks share, two at a time. The first unfinished
bucket always has both its ends waiting for it, so nothing can lock up. A rank that fails closes its connections,
and so the failure reaches every rank that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from grpo_mlm.bridge.assemble import Arrivals
from grpo_mlm.bridge.buckets import Bucket, pack, schedule
from grpo_mlm.bridge.checksums import Verify
from grpo_mlm.bridge.group import Flight, JointGroup
from grpo_mlm.bridge.handoff import Outbox

__all__ = ["Bucket", "arrivals", "schedule", "send"]

IN_FLIGHT = 2  # buckets: one travels while the next is packed or the last unpacked
Flying = tuple[Flight | None, Tensor, Callable[[], None] | None]
"""A transfer, None where there is nothing to wait for; its bytes; what is to be done when it has ended."""


@torch.no_grad()
def send(
    order: Sequence[Bucket],
    rank: int,
    params: Mapping[str, Tensor],
    group: JointGroup,
    first_destination: int,
    verify: Verify = Verify(),  # noqa: B008 - immutable
    outbox: Outbox | None = None,
) -> int:
    """Send all that source `rank` owes; returns the bytes of it.

    Destination d is rank `first_destination + d` of the group. With placement `colocated` that is the trainer rank on
    its device: on a rank with an `outbox`, what comes for that destination is handed over to it there.
    """
    flying: deque[Flying] = deque()
    owed = 0
    try:
        for bucket in order:
            if bucket.src == rank:
                owed += bucket.payload
            if outbox and first_destination + bucket.dst == rank:
                flying.append(_through_slot(bucket, rank, params, group, verify, outbox))
            elif bucket.src == rank:
                flat = _packed(bucket, params, verify)
                flying.append((group.send(flat, first_destination + bucket.dst), flat, None))
            if len(flying) == IN_FLIGHT:
                _finish(flying.popleft())
        while flying:
            _finish(flying.popleft())
        if outbox:
            outbox.drain()
    except BaseException:
        flying.clear()
        group.close()
        if outbox:
            outbox.close()
        raise
    return owed


def arrivals(order: Sequence[Bucket], rank: int, device: torch.device, group: JointGroup) -> Arrivals:
    """What destination `rank` gets over the joint group."""
    mine = deque(bucket for bucket in order if bucket.dst == rank)
    flying: deque[tuple[Flight, Tensor, Bucket]] = deque()
    try:
        while mine or flying:
            while mine and len(flying) < IN_FLIGHT:
                bucket = mine.popleft()
                flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
                flying.append((group.recv(flat, bucket.src), flat, bucket))
            flight, flat, bucket = flying.popleft()
            flight.wait()
            yield bucket, flat
    except BaseException:
        flying.clear()
        group.close()
        raise


def _through_slot(
    bucket: Bucket,
    rank: int,
    params: Mapping[str, Tensor],
    group: JointGroup,
    verify: Verify,
    outbox: Outbox,
) -> Flying:
    """A bucket for the engine rank on this device: packed into its slot, or received there from another rank."""
    slot = outbox.free_slot(bucket.nbytes)
    if bucket.src == rank:
        pack(bucket, params, slot)
        verify.sign(bucket, slot)
        return None, slot, outbox.hand_over
    return group.recv(slot, bucket.src), slot, outbox.hand_over


def _packed(bucket: Bucket, params: Mapping[str, Tensor], verify: Verify) -> Tensor:
    """A new flat tensor with the bucket's pieces of these weights, on their device."""
    device = params[bucket.copies[0].src_local].device
    flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
    pack(bucket, params, flat)
    verify.sign(bucket, flat)
    return flat


def _finish(flying: Flying) -> None:
    flight, _, then = flying
    if flight is not None:
        flight.wait()
    if then is not None:
        then()
