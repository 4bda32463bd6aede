"""Slices of safetensors folders, against the library's own reading, and files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from grpo_mlm.bridge.durable import NewFile
from grpo_mlm.bridge.hf_index import pack_files
from grpo_mlm.bridge.hf_store import HFStore
from grpo_mlm.bridge.safetensors_header import read_header
from grpo_mlm.bridge.safetensors_stream import Plain, SafetensorsWriter
from grpo_mlm.errors import NamesDiffer, RunFailure, UserError
from grpo_mlm.layouts.model import read_model_spec
from tests.convert.models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("store") / "hf", "qwen3_moe", max_shard_size="60KB")


def open_store(folder: Path, *allow_missing: str) -> HFStore:
    return HFStore(folder, read_model_spec(folder), allow_missing)


def test_slices_are_those_of_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mlm.bridge.hf_store._BLOCK_BYTES", 1000)  # several blocks where columns are cut
    store = open_store(folder)
    assert store.files() == sorted(folder.glob("*.safetensors"))
    random = torch.Generator().manual_seed(0)
    for path in store.files():
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                whole = file.get_tensor(name)
                assert store.layout.shapes[name] == tuple(whole.shape)
                assert store.dtype(name) == whole.dtype
                cuts = [sorted(torch.randperm(n + 1, generator=random)[:2].tolist()) for n in whole.shape]
                got = store.read(name, tuple((a, b) for a, b in cuts))
                assert torch.equal(got, whole[tuple(slice(a, b) for a, b in cuts)])
                assert got.is_contiguous()


def test_fused_experts_are_matrices(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "qwen3_moe", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    experts = "model.layers.0.mlp.experts."
    gates = [tensors.pop(f"{experts}{e}.gate_proj.weight") for e in range(8)]
    ups = [tensors.pop(f"{experts}{e}.up_proj.weight") for e in range(8)]
    fused = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    assert fused.shape == (8, 48, 32)
    downs = torch.stack([tensors.pop(f"{experts}{e}.down_proj.weight") for e in range(8)])
    both = {**tensors, experts + "gate_up_proj": fused, experts + "down_proj": downs}
    save_file(both, folder / "model.safetensors")
    store = open_store(folder)
    assert torch.equal(
        store.read(experts + "gate_up_proj", ((40, 150), (3, 9))), fused.view(384, 32)[40:150, 3:9]
    )
    assert torch.equal(store.read_canonical(f"{experts}5.up_proj.weight", ((2, 9), (0, 32))), ups[5][2:9])
    turned = {**both, experts + "gate_up_proj": fused.view(4, 96, 32)}  # as many rows, but of four experts
    save_file(turned, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"has shape \(4, 96, 32\), config.json means \(8, 48, 32\)"):
        open_store(folder)


def test_names_that_differ_and_may(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file({**tensors, "visual.a": torch.ones(1), "visual.b": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(
        NamesDiffer, match=r"missing: model\.norm\.weight; not in this model: visual\.a, visual\.b"
    ):
        open_store(folder)
    with pytest.raises(NamesDiffer, match=r"not in this model: visual\.b"):
        open_store(folder, "model.norm.*", "*.a")
    store = open_store(folder, "model.norm.weight", "visual.*")
    assert store.skipped == ("model.norm.weight", "visual.a", "visual.b")
    assert store.layout.shapes.keys() == tensors.keys()


def write_file(path: Path, header: object, data: int) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


def entry(start: int, stop: int, shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape or [(stop - start) // 4], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "b overlaps a"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "b leaves a gap after a"),
        ({"a": entry(0, 8)}, 4, "cut short"),
        ({"a": entry(0, 8)}, 12, "too long"),
        ({"a": entry(0, 8, [3])}, 8, r"a \(F32, shape \(3,\)\) does not fit"),
        ({"a": entry(0, 8, [-2])}, 8, "does not fit"),
        ({"a": {"dtype": "F32"}}, 8, "describes a as"),
        ({"a": {**entry(0, 8), "dtype": "X7"}}, 8, "describes a as"),
        ([], 0, "no JSON object"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, header: object, data: int, words: str) -> None:
    path = write_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(UserError, match=words) as error:
        read_header(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"short", bytes(8), (1 << 60).to_bytes(8, "little") + b"{}", b"\1" * 300]
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.safetensors is not a readable safetensors file"):
        read_header(tmp_path / "x.safetensors")


def test_what_is_streamed_is_what_the_library_reads(tmp_path: Path) -> None:
    """All dtypes, odd lengths and an empty tensor; wide ones come first, as readers need them aligned."""
    tensors = {
        "half": torch.randn(3).half(),
        "brain": torch.randn(5, 3).bfloat16(),
        "empty": torch.empty(0, 4),
        "single": torch.randn(7),
        "double": torch.randn(2, 2, 2).double(),
    }
    plain = {name: Plain(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    [(file, order)] = pack_files(plain, 1 << 20).items()
    assert file == "model.safetensors"
    with NewFile(tmp_path / file, with_hash=True) as stream:
        writer = SafetensorsWriter(stream, order)
        for name in order:
            for part in tensors[name].reshape(-1).split(4):
                writer.write(part)
        writer.close()
    got = load_file(tmp_path / file)
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    assert {n: s.shape for n, s in read_header(tmp_path / file).items()} == {
        n: p.shape for n, p in plain.items()
    }


def test_a_file_that_lacks_elements_is_no_file(tmp_path: Path) -> None:
    with NewFile(tmp_path / "file") as stream:
        writer = SafetensorsWriter(stream, {"a": Plain(torch.float32, (3,))})
        writer.write(torch.ones(2))
        with pytest.raises(RunFailure, match="its header means"):
            writer.close()
