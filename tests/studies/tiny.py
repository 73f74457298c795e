"""A study of a few seconds, importable by the processes that tests kill."""

from steppe.lab.recipes import recipe
from steppe.lab.tuning import Tune
from studies.definitions import CONTROLS, LARGE, Setting, Study

CONFIG = recipe("digits").replace(
    steps=8, threads=1, device="cpu", track_train=True, recompute_norm=True, eval_every=1
)


def tiny(minima=False, steps=8, seeds=2):
    setting = Setting(
        "mlp",
        "MLP, few steps",
        CONFIG.replace(steps=steps),
        seeds,
        0.1,
        methods=("sgd", "arwp"),
        controls=CONTROLS[:4],
        tune=Tune(
            rises=(0.02, 0.2), factors=(0.5, 1.0), seeds=1, extend=False, baseline=True, keep=False
        ),
        tuned_controls=CONTROLS[1:2],
        large=("rwp:rise=0.2",) if minima else (),
        robust=minima,
        minima=minima,
    )
    return Study("tiny", "Tiny", ((setting,),), cut=("Nothing else.",))


def rich(seeds=6, minima=False):
    """All methods and trials: for evidence that is made up."""
    setting = Setting(
        "mlp",
        "MLP, few steps",
        CONFIG,
        seeds,
        0.1,
        tuned_controls=CONTROLS[1:2],
        methods=("sgd", "sam", "rwp", "arwp", "m-rwp", "m-arwp"),
        large=LARGE if minima else (),
        robust=minima,
        minima=minima,
    )
    return Study("rich", "Rich", ((setting,),), cut=("Nothing else.",))
