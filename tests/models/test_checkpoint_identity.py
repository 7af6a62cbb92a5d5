"""Which weights a checkpoint has: fine-tunes that share everything else are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import checkpoint_identity, weights_identity


def checkpoint(folder: Path, tensors: dict[str, bytes]) -> Path:
    """A safetensors file and the index that all fine-tunes of it share."""
    folder.mkdir()
    at, header = 0, {}
    for name, content in tensors.items():
        about = {"dtype": "U8", "shape": [len(content)], "data_offsets": [at, at + len(content)]}
        header[name] = about
        at += len(content)
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + b"".join(tensors.values())
    (folder / "model.safetensors").write_bytes(file)
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_fine_tune_with_the_same_index_has_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {f"layers.{n}": bytes(100_000) for n in range(8)}
    one = weights_identity(checkpoint(tmp_path / "one", base))
    assert weights_identity(checkpoint(tmp_path / "same", base)) == one
    monkeypatch.setattr(checkpoint_identity, "_SMALL", 1000)  # large: samples alone are read
    sampled = weights_identity(tmp_path / "one")
    for n in base:
        tuned = {**base, n: b"\x01" * 100_000}
        folder = checkpoint(tmp_path / f"tuned {n}", tuned)
        assert weights_identity(folder) != sampled, n


def test_files_of_the_hubs_cache_are_known_by_their_names(tmp_path: Path) -> None:
    found: list[str] = []
    for digest in ("a" * 64, "b" * 64, "a" * 64):
        cache = tmp_path / f"cache {len(found)}"
        (cache / "blobs").mkdir(parents=True)
        (cache / "blobs" / digest).write_bytes(bytes(1000))
        snapshot = cache / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(cache / "blobs" / digest)
        found.append(weights_identity(snapshot))
    assert found[0] == found[2] != found[1]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(AtlasError) as refusal:
        weights_identity(tmp_path)
    assert refusal.value.code == Code.BAD_CONFIG
