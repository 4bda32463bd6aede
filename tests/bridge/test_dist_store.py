"""Slices of distributed checkpoints against whole tensors, and files that are damaged or hostile."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_mlm.bridge import dist_store
from grpo_mlm.bridge.dist_store import DistStore
from grpo_mlm.bridge.dist_writer import FilePlan, Item, item_record, write_item, write_metadata
from grpo_mlm.errors import NamesDiffer, UserError
from grpo_mlm.layouts.boxes import slices
from grpo_mlm.layouts.megatron_dist import dist_layout
from tests.bridge.dist_checkpoint import Tensors, assert_equal, held, read_checkpoint, write_checkpoint
from tests.layouts.test_experts import moe_spec
from tests.layouts.test_megatron_dist import QWEN2
from tests.layouts.test_views import random_weights

FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    folder = tmp_path_factory.mktemp("dist") / "checkpoint"
    weights = {name: t.float() for name, t in random_weights(QWEN2).items()}
    write_checkpoint(folder, QWEN2, weights, item_bytes=128, file_bytes=1 << 12)
    return folder, weights


def write_grids(folder: Path, layout: Any, tensors: Tensors, seed: int) -> None:
    """Every tensor cut along all of its axes at random places, the chunks in random order in three files."""
    rng = random.Random(seed)
    folder.mkdir()
    files = [FilePlan(f"__{i}_0.distcp", (), 0) for i in range(3)]
    streams = [(folder / file.name).open("wb") for file in files]
    records = []
    for name, shape in layout.stored.items():
        cuts = [sorted({0, n, *(rng.randrange(n) for _ in range(2))}) for n in shape]
        grid: list[list[tuple[int, int]]] = [[]]
        for axis in cuts:
            grid = [[*box, span] for box in grid for span in pairwise(axis)]
        rng.shuffle(grid)
        for box in grid:
            item = Item(name, (), tuple(a for a, _ in box), tuple(b - a for a, b in box), shape)
            i = rng.randrange(3)
            part = tensors[name].view(shape)[slices(tuple(box))]
            records.append(item_record(files[i], item, part.dtype, *write_item(streams[i], item, part)))
    for stream in streams:
        stream.close()
    write_metadata(folder, records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_box_of_any_grid(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks over columns, rows, several layers and experts at once; blocks of few rows."""
    monkeypatch.setattr(dist_store, "_BLOCK_BYTES", 64)
    spec = moe_spec()
    layout = dist_layout(spec)
    weights = {name: t.to(dtype) for name, t in random_weights(spec).items()}
    tensors = held(layout, weights)
    write_grids(tmp_path / "grid", layout, tensors, seed=0)
    store = DistStore(tmp_path / "grid", spec)
    assert_equal(read_checkpoint(store), weights)
    rng = random.Random(1)
    for name, tensor in tensors.items():
        assert store.dtype(name) == dtype
        for _ in range(20):
            ends = [sorted(rng.sample(range(n + 1), 2)) for n in tensor.shape]
            box = tuple((start, stop) for start, stop in ends)
            assert torch.equal(store.read(name, box), tensor[slices(box)]), (name, box)
    assert [path.name for path in store.files()] == [f"__{i}_0.distcp" for i in range(3)]


def test_threads_read_together(written: tuple[Path, Tensors]) -> None:
    folder, weights = written
    store = DistStore(folder, QWEN2)
    start = threading.Barrier(4)

    def read(_: int) -> Tensors:
        start.wait()
        return read_checkpoint(store)

    with ThreadPoolExecutor(4) as pool:
        for tensors in pool.map(read, range(4)):
            assert_equal(tensors, weights)


class Allocations(TorchDispatchMode):
    """The largest storage that any operation gave back."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.most = max(self.most, out.untyped_storage().nbytes())
        return out


def test_no_more_than_the_slice_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One item of all experts of a layer is 24 rows of 8 columns: one column of it comes through blocks of 64 bytes."""
    monkeypatch.setattr(dist_store, "_BLOCK_BYTES", 64)
    spec = moe_spec()
    layout = dist_layout(spec)
    write_grids(tmp_path / "grid", layout, held(layout, random_weights(spec)), seed=2)
    store = DistStore(tmp_path / "grid", spec)
    with Allocations() as seen:
        store.read(FC1, ((0, 4 * 8 * 24), (3, 4)))
        assert seen.most == 4 * 8 * 24 * 8
        seen.most = 0
        store.read(FC1, ((5, 9), (0, 8)))
        assert seen.most == 4 * 8 * 8


def damage(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "__0_0.distcp",
            None,
            "__0_0.distcp with embedding.word_embeddings.weight cannot be read: No such file",
        ),
        ("__0_0.distcp", lambda x: x[:-1], r"__0_0.distcp is cut short: .*ends at byte"),
        (
            "__0_0.distcp",
            lambda x: bytes(len(x)),
            r"__0_0.distcp is damaged at embedding.word_embeddings.weight, off",
        ),
        ("__0_0.distcp", lambda x: x.replace(b"FloatStorage", b"HalfStorage\x00"), "is damaged at"),
        (".metadata", None, "metadata cannot be read: No such file or directory; without it"),
        (".metadata", lambda x: x[: len(x) // 2], "metadata is (damaged|refused)"),
        (".metadata", lambda x: pickle.dumps(Attack()), "metadata is refused: it names posix.system"),
        (
            ".metadata",
            lambda x: pickle.dumps(OrderedDict(a=1)),
            "metadata is refused: it names collections.Ordered",
        ),
        (".metadata", lambda x: pickle.dumps({"a": 1}), "metadata is damaged"),
        ("metadata.json", None, "is no distributed checkpoint: it has no metadata.json"),
        ("metadata.json", lambda x: b"{", "metadata.json is damaged"),
        (
            "metadata.json",
            lambda x: json.dumps({"sharded_backend": "zarr"}).encode(),
            "backend 'zarr' cannot be read",
        ),
    ],
)
def test_damaged_checkpoints(
    name: str,
    change: Callable[[bytes], bytes] | None,
    said: str,
    written: tuple[Path, Tensors],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One error that names the file; nothing that the files say is run."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(written[0], tmp_path / "damaged")
    if change is None:
        (folder / name).unlink()
    else:
        damage(folder, name, change)
    with pytest.raises(UserError, match=said):
        read_checkpoint(DistStore(folder, QWEN2))
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Attack(), "it names posix.system, which no plain tensor needs"),
        ({"weight": torch.zeros(4, 8)}, "it holds no plain tensor"),
        (torch.zeros(8, 4).t(), "its tensor is a view with strides"),
        (torch.zeros(8, 8)[:4], "its tensor is a view with strides"),
        (torch.zeros(8, 4), r"it holds torch.float32 \(8, 4\), the index says torch.float32 \(4, 8\)"),
        (torch.zeros(4, 8).half(), r"it holds torch.float16 \(4, 8\), the index says torch.float32"),
    ],
)
def test_an_item_that_is_not_what_the_index_says(
    value: Any, said: str, written: tuple[Path, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by name, neither run nor misread. Items of the embedding are 4 rows of 8 columns."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(written[0], tmp_path / "damaged")
    index = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / "__0_0.distcp").open("ab") as stream:
        for key, place in index.storage_data.items():
            if key.fqn == "embedding.word_embeddings.weight" and tuple(key.offset) == (0, 0):
                place.relative_path, place.offset = "__0_0.distcp", stream.tell()
                torch.save(value, stream)
                place.length = stream.tell() - place.offset
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    store = DistStore(folder, QWEN2)
    with pytest.raises(
        UserError, match=f"__0_0.distcp is damaged at embedding.word_embeddings.weight.*{said}"
    ):
        store.read("embedding.word_embeddings.weight", ((0, 1), (0, 8)))
    assert not (tmp_path / "attacked").exists()


def test_a_file_elsewhere_is_not_opened(written: tuple[Path, Tensors], tmp_path: Path) -> None:
    folder = shutil.copytree(written[0], tmp_path / "damaged")
    index = pickle.loads((folder / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = "../" + place.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="expected a file of this folder"):
        DistStore(folder, QWEN2)


def test_chunks_that_are_not_the_whole_tensor(written: tuple[Path, Tensors], tmp_path: Path) -> None:
    folder = shutil.copytree(written[0], tmp_path / "damaged")
    index = pickle.loads((folder / ".metadata").read_bytes())
    del index.state_dict_metadata["output_layer.weight"].chunks[3]
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(
        UserError, match=r"output_layer.weight is not whole: its chunks hold 2016 elements of 2048"
    ):
        DistStore(folder, QWEN2)


def test_another_model(written: tuple[Path, Tensors]) -> None:
    with pytest.raises(
        NamesDiffer, match=r"dist.*/checkpoint: the checkpoint does not match config.json \(qwen3_moe"
    ):
        DistStore(written[0], moe_spec())


def test_integers_are_no_weights(written: tuple[Path, Tensors], tmp_path: Path) -> None:
    """A checkpoint as others may write it: one item holds integers and the index says so."""
    folder = shutil.copytree(written[0], tmp_path / "whole")
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.state_dict_metadata["embedding.word_embeddings.weight"].properties.dtype = torch.int32
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"embedding.word_embeddings.weight is stored as torch.int32"):
        DistStore(folder, QWEN2)
