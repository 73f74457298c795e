"""Studies: sets of comparisons whose every run is a line of evidence that is kept for good."""

from studies.definitions import STUDIES, Setting, Study
from studies.evidence import Evidence, Line
from studies.plan import Entry, Plan, make_plan
from studies.runner import run_study

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
