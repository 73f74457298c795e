"""What `import steppe` adds to `import torch`, in seconds.

    python benchmarks/imports.py [--rounds 15] [--quick] [--out FILE]

Each import runs in a new process, and the two take turns. Measured inside the process, from before the
import of torch, so that starting Python does not count; what steppe adds is also measured directly, as
the time of `from steppe import *` after `import torch` (the names are imported when first used).
"""

from __future__ import annotations

import subprocess
import sys

import measure

CODE = """
import time
begin = time.perf_counter()
import torch
between = time.perf_counter()
{more}
end = time.perf_counter()
print(end - begin, end - between)
"""


def seconds(more: str) -> tuple[float, float]:
    command = [sys.executable, "-c", CODE.format(more=more)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(found[0]), float(found[1])


def main() -> None:
    parser = measure.parser(__doc__, "one round")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    crowded = measure.busy()
    rounds = 1 if arguments.quick else arguments.rounds
    plain, both, own = [], [], []
    seconds("from steppe import *")  # compiles the byte code
    for _ in range(rounds):
        plain.append(seconds("")[0])
        whole, after_torch = seconds("from steppe import *")
        both.append(whole)
        own.append(after_torch)
    found = {"import torch": plain, "import torch, steppe": both, "import steppe after torch": own}
    result = {"seconds": measure.show(found, "s"), "bar": 0.1}
    measure.publish("imports", result, arguments.out, crowded)


if __name__ == "__main__":
    main()
