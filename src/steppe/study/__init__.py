"""Studies: sets of comparisons whose every run is a line of evidence that is kept for good."""

from steppe.study.definitions import STUDIES, Setting, Study
from steppe.study.evidence import Evidence, Line
from steppe.study.plan import Entry, Plan, make_plan
from steppe.study.runner import run_study

__all__ = [
    "STUDIES",
    "Entry",
    "Evidence",
    "Line",
    "Plan",
    "Setting",
    "Study",
    "make_plan",
    "run_study",
]
