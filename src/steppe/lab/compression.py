"""What is left of trained models after compression: forwards only, kept beside each run.

compressed.json in a run's folder: metrics on the test data, by BatchNorm's statistics and change
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from steppe.analysis.changes import Change, Pruning, Rounding, words
from steppe.analysis.robustness import changed_weights
from steppe.batchnorm import recompute_norm_stats
from steppe.lab.problems import Sources, device, load_trained, training_batches
from steppe.lab.results import Compressed, Result
from steppe.lab.runs import COMPRESSED, Run
from steppe.lab.tasks import evaluate
from steppe.noise import Draw

logger = logging.getLogger("steppe")

CHANGES: tuple[Change, ...] = (Rounding(4), Rounding(3), Pruning(0.5), Pruning(0.8))
RECALIBRATION = 1024
"""Training samples from which BatchNorm's statistics are recomputed."""


def name_of(change: Change) -> str:
    """The change in words, under which its metrics are kept."""
    return words(change.kind, change.size, change.scheme)


def with_compression(results: Sequence[Result], sources: Sources, *, quiet: bool) -> list[Result]:
    """The results with metrics after compression, measured where a run does not have them yet."""
    wanted = {name_of(change) for change in CHANGES}
    finished = [result for result in results if result.status == "finished"]
    todo = [r for r in finished if r.folder and not wanted <= set(r.compressed.get("as is", ()))]
    if not quiet and any(result.folder is None for result in finished):
        logger.info("not measured after compression: the models are not kept (no store)")
    if todo and not quiet:
        logger.info("measuring %d models after rounding and pruning", len(todo))
    return [
        dataclasses.replace(result, compressed=compress(Run(result.folder), sources))
        if result.folder and any(result is each for each in todo)
        else result
        for result in results
    ]


def compress(run: Run, sources: Sources | None = None) -> Compressed:
    """Measure a finished run's model after each change and keep the metrics in its folder."""
    problem = load_trained(run, sources)
    model = problem.model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = changed_weights(model)
    batches = training_batches(problem, run.config, RECALIBRATION)
    batches = [batch.to(device()) for batch in batches]
    found: Compressed = {"as is": {}, **({"recalibrated": {}} if batches else {})}
    for change in (Change(), *CHANGES):
        weights = change.weights([state[name] for name in names], Draw(seed=0, step=0))
        model.load_state_dict(state)
        # Apart from the whole state, which names a shared tensor several times.
        model.load_state_dict(dict(zip(names, weights, strict=True)), strict=False)
        for statistics, metrics in found.items():
            if statistics == "recalibrated":
                recompute_norm_stats(model, batches)
            metrics[name_of(change)] = evaluate(model, problem.data.test, problem.task)
    run.write_json(COMPRESSED, found)
    return found
