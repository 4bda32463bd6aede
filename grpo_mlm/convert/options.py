"""What a conversion is told, and how it tells of its progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

Dtype = Literal["keep", "bfloat16", "float16", "float32"]
TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class Options:
    """Of `import_checkpoint` and `export_checkpoint`.

    `memory_limit` bounds the buffers of all workers together, in bytes; Python and its libraries come on top
    (about 300 MB). `max_shard_size` bounds an output file, in bytes, unless one tensor alone is larger.
    `allow_missing` are glob patterns of tensor names. `reference` is the Hugging Face folder with the config and the
    tokenizer of a checkpoint that does not carry them.
    """

    workers: int = 2
    memory_limit: int = 512 << 20
    max_shard_size: int = 5 << 30
    dtype: Dtype = "keep"
    allow_missing: tuple[str, ...] = ()
    restart: bool = False
    reference: Path | None = None
    allow_remote_code: bool = False


class Progress(Protocol):
    """Told how a conversion goes on."""

    def start(self, total: int, done: int) -> None:
        """Of `total` bytes to write, an earlier run has left `done`."""
        ...

    def advance(self, n: int) -> None:
        """`n` more bytes are written. Called from several threads."""
        ...

    def say(self, text: str) -> None:
        """A line for the user. Called from several threads."""
        ...


class Silent:
    """Progress that nobody watches."""

    def start(self, total: int, done: int) -> None: ...

    def advance(self, n: int) -> None: ...

    def say(self, text: str) -> None: ...
