"""Memory is bounded by the limit that is set, not by the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_mlm.bridge.durable import NewFile
from grpo_mlm.bridge.safetensors_stream import Plain, SafetensorsWriter
from grpo_mlm.layouts.model import canonical_tensors, read_model_spec
from tests.convert.command import QWEN3

MIB = 1 << 20
RUN = """
import resource, sys
from pathlib import Path
import torch.distributed.checkpoint.metadata
from grpo_mlm.convert.job import convert
from grpo_mlm.convert.options import Options, Silent

src, small, out, limit = sys.argv[1:]
def run(src, out):
    for output in ("torch_dist", "hf"):
        convert(Path(src), Path(out + output), output, Options(workers=2, memory_limit=int(limit)), Silent())
        src = out + output
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = run(small, out + "_small")
print((run(src, out) - before) * 1024)
"""


def make_model(folder: Path, **sizes: int) -> Path:
    """A model of zeros; its config alone decides how large it is."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3 | sizes))
    shapes = canonical_tensors(read_model_spec(folder))
    tensors = {name: Plain(torch.float32, shape) for name, shape in shapes.items()}
    with NewFile(folder / "model.safetensors") as file:
        writer = SafetensorsWriter(file, tensors)
        for tensor in tensors.values():
            writer.write(torch.zeros(tensor.shape))
        writer.close()
    return folder


@pytest.mark.slow
def test_a_large_model_needs_no_more_than_the_limit(tmp_path: Path) -> None:
    """300 MB, one tensor of them half; through 24 MiB of buffers, both ways."""
    small = make_model(tmp_path / "small")
    large = make_model(
        tmp_path / "large", vocab_size=75_000, hidden_size=512, intermediate_size=8192, num_hidden_layers=3
    )
    assert (large / "model.safetensors").stat().st_size > 300e6
    arguments = [large, small, tmp_path / "out", 24 * MIB]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert int(done.stdout) < 24 * MIB + 24 * MIB  # and some slack for the allocator
