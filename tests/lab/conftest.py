"""Real data for tests: laid out once in the ignored folder `data/`, skipped where it is absent."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PREPARE = PROJECT.parent / "shared" / "data" / "prepare"
MARKERS = {
    "cifar10": "cifar-10-batches-py/batches.meta",
    "cifar100": "cifar-100-python/meta",
    "photos": "tiny-imagenet-mini",
    "imagenet": "imagenet-sample-4",
}


@pytest.fixture(scope="session")
def real_data():
    """A function from a data set's name to the folder that holds the real one."""
    root = Path(os.environ.get("STEPPE_TEST_DATA", PROJECT / "data" / "real"))

    def prepared(name):
        if (root / MARKERS[name]).exists():
            return root
        if not PREPARE.exists():
            pytest.skip(f"the real {name} is not on this machine ({PREPARE} is absent)")
        root.mkdir(parents=True, exist_ok=True)
        with (root / ".lock").open("w") as lock:  # several test processes may ask at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = subprocess.run(
                [sys.executable, str(PREPARE), str(root), name], capture_output=True, text=True
            )
        if done.returncode:
            pytest.skip(f"the real {name} could not be prepared: {done.stderr.strip()[-200:]}")
        return root

    return prepared
