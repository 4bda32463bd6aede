"""The local handoff: a trainer rank fills slots that the engine rank on the same device empties.

Bucket k of all syncs, counted from 0, lies in slot k % 2. Over the channel go `full k` and, back, `empty k`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_mlm.bridge.assemble import Arrivals
from grpo_mlm.bridge.buckets import Bucket
from grpo_mlm.bridge.channel import Channel
from grpo_mlm.bridge.slots import SLOTS, make_slots, open_slots
from grpo_mlm.errors import RunFailure

_MESSAGE = struct.Struct("<cQ")
_FULL, _EMPTY = b"F", b"E"


class Outbox:
    """The trainer's end. Slots of `nbytes`, the largest bucket, are made once."""

    def __init__(self, channel: Channel, nbytes: int, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._slots, (message, fds) = make_slots(nbytes, device)
        channel.send(message, fds)
        for fd in fds:
            os.close(fd)
        # Buckets that got a slot; those of them that were handed over; and those that have been taken.
        self._given = self._full = self._empty = 0

    def free_slot(self, nbytes: int) -> Tensor:
        """Room for the next bucket, uint8 `[nbytes]`, once the engine has emptied it.

        The bucket before the last must have been handed over, or nobody would ever empty its slot.
        """
        while self._given - self._empty >= SLOTS:
            self._wait()
        self._given += 1
        return self._slots[(self._given - 1) % SLOTS][:nbytes]

    def hand_over(self) -> None:
        """The oldest slot that was asked for and not handed over is full."""
        _finish_device_work(self._device)
        self._channel.send(_MESSAGE.pack(_FULL, self._full))
        self._full += 1

    def drain(self) -> None:
        """Return once the engine has taken everything."""
        while self._empty < self._full:
            self._wait()

    def close(self) -> None:
        self._channel.close()

    def _wait(self) -> None:
        _expect(self._channel, _EMPTY, self._empty)
        self._empty += 1


class Inbox:
    """The engine's end."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._slots = open_slots(*channel.recv(max_fds=1), device)
        self._taken = 0

    def arrivals(self, order: Sequence[Bucket], rank: int) -> Arrivals:
        """What destination `rank` gets, in place: a slot is free again when the next bucket is asked for."""
        try:
            for bucket in order:
                if bucket.dst == rank:
                    _expect(self._channel, _FULL, self._taken)
                    yield bucket, self._slots[self._taken % SLOTS][: bucket.nbytes]
                    _finish_device_work(self._device)
                    self._channel.send(_MESSAGE.pack(_EMPTY, self._taken))
                    self._taken += 1
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._channel.close()


def _expect(channel: Channel, kind: bytes, number: int) -> None:
    message, _ = channel.recv()
    if message != _MESSAGE.pack(kind, number):
        raise RunFailure(f"{channel.peer}: the handoff is out of step ({message!r} at bucket {number})")


def _finish_device_work(device: torch.device) -> None:
    """The other process must see what the kernels wrote, and not write while they read."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
