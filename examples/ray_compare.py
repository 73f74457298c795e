"""A comparison on Ray: every run a task of a cluster.

Without an address a cluster is started on this machine, and stopped at the end.

    python examples/ray_compare.py
    python examples/ray_compare.py --address auto    # on the cluster that runs here

The model is defined in this file; Ray takes it along to wherever a run is trained.
"""

import argparse
import tempfile

from torch import nn

from steppe import lab
from steppe.lab.ray_engine import Ray


def model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--address", help="a running cluster, HOST:PORT or auto")
    parser.add_argument("--store", help="keep the runs in this folder, shared by all nodes")
    parser.add_argument("--quick", action="store_true", help="ten steps: only to see it run")
    arguments = parser.parse_args()
    config = lab.Config(
        data="digits",
        train_size=400,
        label_noise=0.2,
        batch=32,
        steps=10 if arguments.quick else 600,
        eval_every=0,
        threads=1,
    )
    with tempfile.TemporaryDirectory() as scratch:
        result = lab.compare(
            model,
            methods=["sgd", "arwp:ratio=.6", "m-arwp:ratio=.9"],
            seeds=1 if arguments.quick else 5,
            config=config,
            store=arguments.store or scratch,
            engine=Ray(address=arguments.address),
        )
    print(result.table())


if __name__ == "__main__":
    main()
