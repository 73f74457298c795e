"""What `import steppe` adds to `import torch`, in seconds.

    python benchmarks/imports.py [--rounds 15] [--quick] [--out FILE]

The time of `from steppe import *` (names are imported when first used) in a new process that has imported torch.
"""

from __future__ import annotations

import subprocess
import sys

import measure

CODE = """
import time, torch
begin = time.perf_counter()
from steppe import *
print(time.perf_counter() - begin)
"""


def seconds() -> float:
    command = [sys.executable, "-c", CODE]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = measure.parser(__doc__, "one round")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    crowded = measure.busy()
    seconds()  # compiles the byte code
    times = [seconds() for _ in range(1 if arguments.quick else arguments.rounds)]
    result = {"seconds": measure.show({"import steppe after torch": times}, "s"), "bar": 0.1}
    measure.publish("imports", result, arguments.out, crowded)


if __name__ == "__main__":
    main()
