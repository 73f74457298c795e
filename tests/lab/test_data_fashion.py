import gzip
from pathlib import Path

import pytest
import torch

from steppe.lab import data
from steppe.lab.data.readers import idx

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def idx_bytes(values):
    sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return bytes([0, 0, 8, values.dim()]) + sizes + values.numpy().tobytes()


def write_small(root, zipped):
    folder = root / "fashion-mnist"
    folder.mkdir(parents=True)
    draws = torch.Generator().manual_seed(0)
    written = {}
    for prefix, n in (("train", 30), ("t10k", 10)):
        images = torch.randint(0, 256, (n, 28, 28), generator=draws, dtype=torch.uint8)
        labels = (torch.arange(n) % 10).to(torch.uint8)
        for name, values in (
            (f"{prefix}-images-idx3-ubyte", images),
            (f"{prefix}-labels-idx1-ubyte", labels),
        ):
            content = idx_bytes(values)
            path = folder / (f"{name}.gz" if zipped else name)
            path.write_bytes(gzip.compress(content) if zipped else content)
        written[prefix] = images
    return written


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_are_read_gzipped_or_not(tmp_path, zipped):
    written = write_small(tmp_path, zipped)
    fashion = data.load("fashion-mnist", root=tmp_path)
    assert torch.equal(fashion.train.inputs.squeeze(1), written["train"])
    assert torch.equal(fashion.test.inputs.squeeze(1), written["t10k"])
    assert fashion.train.targets.tolist() == [k % 10 for k in range(30)]
    x, y = next(fashion.train.batches([torch.arange(7)], augment_seed=0))
    assert (x.shape, x.dtype, y.dtype) == ((7, 1, 28, 28), torch.float32, torch.int64)


def test_damaged_files_are_named(tmp_path):
    write_small(tmp_path, zipped=True)
    file = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    content = file.read_bytes()
    file.write_bytes(content[:2000])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is damaged"):
        data.load("fashion-mnist", root=tmp_path)
    file.write_bytes(gzip.compress(gzip.decompress(content)[:-5]))
    with pytest.raises(ValueError, match="promises 23520 values and has 23515"):
        data.load("fashion-mnist", root=tmp_path)
    with pytest.raises(ValueError, match="is not an idx file of bytes"):
        idx(b"<html>", "page")


def test_debians_package_is_found_and_is_the_published_set(tmp_path):
    if not DEBIAN.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    fashion = data.load("fashion-mnist", root=tmp_path)
    assert (len(fashion.train), len(fashion.test)) == (60_000, 10_000)
    x, _ = next(fashion.train.batches(data.sequential_order(60_000, 60_000), augment_seed=None))
    assert abs(x.mean().item()) < 1e-3
    assert abs(x.std().item() - 1) < 1e-3
    assert "as published" in data.verify("fashion-mnist", tmp_path)


def test_the_place_of_debians_package_is_searched(tmp_path, monkeypatch):
    from dataclasses import replace

    from steppe.lab.data import catalog

    write_small(tmp_path / "system", zipped=True)
    entry = replace(
        catalog.CATALOGUE["fashion-mnist"], elsewhere=(str(tmp_path / "system" / "fashion-mnist"),)
    )
    monkeypatch.setitem(catalog.CATALOGUE, "fashion-mnist", entry)
    assert len(data.load("fashion-mnist", root=tmp_path / "empty").train) == 30
