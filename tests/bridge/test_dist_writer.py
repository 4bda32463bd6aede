"""What the writer plans and writes, by arithmetic and by torch's own reader."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from grpo_mlm.bridge.dist_writer import Item, plan_files, write_item, write_metadata
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import intersect, volume
from grpo_mlm.layouts.megatron_dist import dist_layout
from tests.bridge.dist_checkpoint import held, write_checkpoint
from tests.layouts.test_experts import moe_spec
from tests.layouts.test_views import random_weights

SPEC = moe_spec()  # 4 layers, 8 experts, hidden 8, ffn 12
FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"  # [4, 8, 24, 8]


def test_items_cover_every_tensor_within_one_layer_and_expert() -> None:
    layout = dist_layout(SPEC)
    dtypes = dict.fromkeys(layout.shapes, torch.bfloat16)
    files = plan_files(layout, dtypes, max_item_bytes=160, max_file_bytes=1000)
    assert files == plan_files(layout, dtypes, 160, 1000)
    items = [item for file in files for item in file.items]
    by_tensor = {name: [item for item in items if item.tensor == name] for name in layout.shapes}
    assert [item.sizes for item in by_tensor[FC1][:4]] == [
        (1, 1, 10, 8),
        (1, 1, 10, 8),
        (1, 1, 4, 8),
        (1, 1, 10, 8),
    ]
    assert by_tensor[FC1][4].offsets == (0, 1, 10, 0)
    assert by_tensor[FC1][4].box == ((34, 44), (0, 8))
    for name, shape in layout.shapes.items():
        assert sum(volume(item.box) for item in by_tensor[name]) == volume(tuple((0, n) for n in shape))
        assert not any(
            intersect(a.box, b.box) for a, b in zip(by_tensor[name], by_tensor[name][1:], strict=False)
        )
    assert [file.name for file in files] == [f"__{i}_0.distcp" for i in range(len(files))]
    for file in files:
        assert file.nbytes == sum(2 * volume(item.box) for item in file.items) <= 1000


def test_one_row_is_the_least() -> None:
    layout = dist_layout(SPEC)
    files = plan_files(
        layout, dict.fromkeys(layout.shapes, torch.float32), max_item_bytes=1, max_file_bytes=1
    )
    assert {item.sizes for file in files for item in file.items if item.tensor == FC1} == {(1, 1, 1, 8)}
    assert all(len(file.items) == 1 for file in files)


def test_an_item_is_a_tensor_of_its_own() -> None:
    """Of a view, what lies outside of it is not written."""
    whole = torch.arange(64.0).view(8, 8)
    stream = io.BytesIO()
    stream.write(b"before")
    item = Item("x", ((0, 2), (0, 8)), (0, 0, 0), (1, 2, 8), (4, 8, 8))
    offset, length = write_item(stream, item, whole[2:4])
    assert (offset, stream.tell()) == (6, 6 + length)
    stored = torch.load(io.BytesIO(stream.getvalue()[6:]), weights_only=True)
    assert torch.equal(stored, whole[2:4].view(1, 2, 8))
    assert stored.untyped_storage().nbytes() == 64


def test_the_index_is_what_torch_reads(tmp_path: Path) -> None:
    weights = random_weights(SPEC)
    write_checkpoint(tmp_path / "whole", SPEC, weights, item_bytes=160)
    assert json.loads((tmp_path / "whole" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert torch.load(tmp_path / "whole" / "common.pt", weights_only=True) == {}
    index = FileSystemReader(tmp_path / "whole").read_metadata()
    layout = dist_layout(SPEC)
    tensor = held(layout, weights)[FC1].view(layout.stored[FC1])
    stored: Any = index.state_dict_metadata[FC1]
    assert (stored.size, stored.properties.dtype) == ((4, 8, 24, 8), torch.float64)
    for key, place in index.storage_data.items():
        if key.fqn == FC1:
            with (tmp_path / "whole" / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                part = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
            box = tuple(slice(a, a + n) for a, n in zip(key.offset, part.shape, strict=True))
            assert torch.equal(part, tensor[box])


@pytest.mark.parametrize(
    ("lose", "said"), [(3, "1 written items hold 8 of its 16"), (None, "3 written items hold 24 of its 16")]
)
def test_records_that_make_no_whole_tensor(lose: int | None, said: str, tmp_path: Path) -> None:
    """Nothing that looks complete is written."""
    half = {
        "tensor": "x",
        "dtype": "float32",
        "shape": [16],
        "sizes": [8],
        "file": "f",
        "offset": 0,
        "length": 9,
    }
    records = [half | {"offsets": [0]}, half | {"offsets": [8]}]
    records = records[:1] if lose else [*records, half | {"offsets": [8]}]
    with pytest.raises(RunFailure, match=said):
        write_metadata(tmp_path, records)
    assert not list(tmp_path.iterdir())
