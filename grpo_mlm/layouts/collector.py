"""Python's garbage collector, out of the way of functions that make hundreds of thousands of small objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Layouts and plans are tuples of tuples, never in a cycle, yet the collector would go through all of them again
    and again while they are made, which doubles the time of a large model's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
