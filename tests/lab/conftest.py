"""Real data for tests: laid out once in the ignored folder `data/`, skipped where it is absent."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import NEEDS

PROJECT = Path(__file__).parents[2]
PREPARE = PROJECT.parent / "shared" / "data" / "prepare"
FOLDERS = {
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "photos": "tiny-imagenet-mini",
    "imagenet": "imagenet-sample-4",
}


@pytest.fixture(scope="session")
def real_data():
    """A function from a data set's name to the folder that holds the real one."""
    root = Path(os.environ.get("STEPPE_TEST_DATA", PROJECT / "data" / "real"))

    def prepared(name):
        ready = root / f".ready-{name}"
        if ready.exists():
            return root
        if not PREPARE.exists():
            if (root / FOLDERS[name]).is_dir():
                return root
            pytest.skip(f"{NEEDS}{FOLDERS[name]}")
        root.mkdir(parents=True, exist_ok=True)
        with (root / ".lock").open("w") as lock:  # several test processes may ask at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            command = [sys.executable, str(PREPARE), str(root), name]
            done = subprocess.run(command, capture_output=True, text=True)
            assert not done.returncode, f"the real {name} could not be prepared: {done.stderr}"
            ready.touch()
        return root

    return prepared
