import os

import pytest
import torch

from steppe.lab import checkpoints
from steppe.lab.errors import LabError


def state(step):
    return {"step": step, "weights": torch.full((3,), float(step)), "note": None}


def test_the_newest_are_kept_and_come_back(tmp_path):
    for step in (1, 20, 300):
        checkpoints.save(tmp_path, step, state(step), keep=2)
    assert [f.name for f in checkpoints.checkpoints(tmp_path)] == [
        "step-000000020.pt",
        "step-000000300.pt",
    ]
    found = checkpoints.load_newest(tmp_path)
    assert found["step"] == 300
    assert torch.equal(found["weights"], state(300)["weights"])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, caplog, damage):
    checkpoints.save(tmp_path, 1, state(1), keep=2)
    file = checkpoints.save(tmp_path, 2, state(2), keep=2)
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(b"")
    assert checkpoints.load_newest(tmp_path)["step"] == 1
    assert str(file) in caplog.text
    assert "damaged" in caplog.text
    with pytest.raises(LabError, match="damaged"):
        checkpoints.load(file)


def test_nothing_but_tensors_and_plain_values_is_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("echo never",)

    file = checkpoints.save(tmp_path, 1, {"step": 1, "evil": Evil()}, keep=1)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        checkpoints.load(file)


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "x"
    checkpoints.write_atomic(file, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LabError, match=r"cannot write .*No space left on device"):
        checkpoints.write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
