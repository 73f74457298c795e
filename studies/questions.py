"""The five primary questions, named before the runs that answer them, and their answers.

Everything else that the studies compare is secondary, and the pages say so.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from steppe.lab.sentences import interval_words
from steppe.lab.tables import Table, join_words, signed
from studies import figures
from studies.comparisons import (
    MARGIN,
    MATCH,
    RANDOM_GAINS,
    Compared,
    best_fixed,
    compared,
    trial_gains,
)
from studies.definitions import FEW
from studies.findings import BESIDE, CHANGES, OURS, Findings

NOTHING = "Not measured yet."
EARLIER = frozenset([
    "d8c6100d1018", "3da2fb9bd7ff", "58116ec18740", "fbe3db765b6e", "1be9d61a8585",
    "43bc055fba3d", "1facfbb4cf17", "4a078a3605ec", "d7c1797477d8", "b06c2bcb656d",
])  # fmt: skip
"""The commits of runs that were made before these questions were named."""


@dataclass(frozen=True)
class Question:
    """A question with one sentence for an answer, and one figure."""

    name: str
    """Of the figure's file."""
    text: str
    answer: Callable[[Sequence[Findings]], str]
    caption: str
    figure: Callable[[Sequence[Findings]], Figure]
    """Asked for where the answer is not `NOTHING`."""
    table: Callable[[Sequence[Findings]], Table | None] = lambda found: None


def cost_answer(found: Sequence[Findings]) -> str:
    """Where a default is significantly worse than the baseline."""
    made = compared(found, RANDOM_GAINS)
    if not made:
        return NOTHING
    about = f"{len(made)} comparisons with the baseline in {len({each.place for each in made})} settings"
    least = min(made, key=lambda each: each.difference.mean)
    lowest = (
        f"{least.claim.first} on {least.place}, {interval_words(least.difference, 2)} points "
        f"(n = {least.difference.n})"
    )
    worse = _of(made, "worse")
    if not worse:
        return f"No: none of {about} is significantly worse; the lowest is {lowest}."
    places = join_words(list(dict.fromkeys(each.place for each in worse)))
    return f"Yes: {len(worse)} of {about} are significantly worse; they are on {places}, and the worst is {lowest}."


def gain_answer(found: Sequence[Findings]) -> str:
    """What the defaults gain in the settings where there is something to gain."""
    made = [
        each
        for each in compared(found, RANDOM_GAINS)
        if each.findings.gap(each.setting) >= figures.OVERFIT
    ]
    if not made:
        return NOTHING
    better, rest = _of(made, "better"), [e for e in made if e.difference.verdict != "better"]
    word = "Yes" if not rest else "In part" if better else "No"
    words = (
        f"{word}: in the {len({each.place for each in made})} settings where it does (a gap of "
        f"{figures.OVERFIT:g} points or more), {len(better)} of {len(made)} comparisons are significantly better"
    )
    words += f" ({_range(better)} points)" if better else ""
    if rest:
        least = max(each.difference.smallest for each in rest)
        words += f", the other {len(rest)} are not ({_range(rest)}; minimum detectable difference up to {least:.1f})"
    return f"{words}."


def match_answer(found: Sequence[Findings]) -> str:
    """Equivalence within the margin, better and worse, counted."""
    made = compared(found, MATCH)
    if not made:
        return NOTHING
    same = [each for each in made if each.equivalent()]
    better, worse = _of(made, "better"), _of(made, "worse")
    good = [each for each in made if each.equivalent() or each.difference.verdict == "better"]
    word = "Yes" if len(good) == len(made) else "In part" if good else "No"
    words = f"{word}: equivalent within {MARGIN:g} points in {len(same)} of {len(made)} settings"
    for which, verdict in ((better, "better"), (worse, "worse")):
        words += f", significantly {verdict} in {len(which)}"
        words += f" ({_range(which)})" if which else ""
    return f"{words}."


def survival_answer(found: Sequence[Findings]) -> str:
    """What RWP keeps at the default and in the setting for compression; `survival_table` has the rest."""
    rows = [row for row in survival_rows(found) if row[0].split(" − ")[0].startswith("RWP")]
    said = [
        f"{pair} {', '.join(gains)} ({better} better, {worse} worse of {of})"
        for pair, *gains, better, worse, of in rows
    ]
    about = f"Mean points after {join_words(CHANGES)} (and how many comparisons are significant)"
    return f"{about}: {'; '.join(said)}." if said else NOTHING


def survival_table(found: Sequence[Findings]) -> Table | None:
    """Both settings of ours against SGD and SAM, change by change."""
    header = ("mean points after", *CHANGES, "better", "worse", "of")
    note = "RWP and m-RWP at the default were named later, and are corrected apart."
    rows = tuple(survival_rows(found))
    return Table(header, rows, notes=(note,)) if rows else None


def survival_rows(found: Sequence[Findings]) -> Iterator[tuple[str, ...]]:
    for second, first in itertools.product(FEW[:2], (*BESIDE, *OURS)):
        made = [compared(found, [(first, second)], change) for change in CHANGES]
        if all(made):
            every = [each for some in made for each in some]
            pair = f"{every[0].claim.first} − {every[0].claim.second}"
            gains = [signed(sum(e.difference.mean for e in each) / len(each)) for each in made]
            counts = (len(_of(every, "better")), len(_of(every, "worse")), len(every))
            yield (pair, *gains, *map(str, counts))


def transfer_answer(found: Sequence[Findings]) -> str:
    """For ratio and rise the one strength that does least harm where it does most."""
    clauses, worst = [], {}
    for unit in figures.UNITS:
        gains = trial_gains(found, unit)
        fixed = best_fixed(gains)
        if fixed is None:
            clauses.append(f"{unit} not measured yet")
            continue
        worst[unit] = fixed.gain
        clauses.append(
            f"the one {unit} of RWP with the smallest worst loss in {len(gains)} settings is "
            f"{fixed.value:g}, {signed(fixed.gain)} points of validation accuracy on {fixed.place}"
        )
    if not worst:
        return NOTHING
    word = "Open" if len(worst) < 2 else "Yes" if worst["rise"] > worst["ratio"] else "No"
    return f"{word}: {'; '.join(clauses)}."


def post_hoc(found: Sequence[Findings]) -> list[str]:
    """A sentence where the questions were chosen with runs already seen."""
    lines = [line for findings in found for line in findings.evidence.lines.values()]
    seen = sum(line.result.environment.get("commit") in EARLIER for line in lines)
    words = (
        f"{seen:,} of {len(lines):,} runs were made before these five questions were named. For them "
        "the choice is post hoc, and its verdicts are exploratory."
    )
    return [words, ""] if seen else []


def _of(made: Sequence[Compared], verdict: str) -> list[Compared]:
    return [each for each in made if each.difference.verdict == verdict]


def _range(made: Sequence[Compared]) -> str:
    means = sorted(each.difference.mean for each in made)
    return " to ".join(dict.fromkeys(map(signed, (means[0], means[-1]))))


PRIMARY = (
    Question(
        "cost",
        "Does the default ever cost accuracy?",
        cost_answer,
        "Points of test accuracy gained over the baseline at default strengths, with intervals.",
        figures.cost_figure,
    ),
    Question(
        "gain",
        "Does it gain where the baseline overfits?",
        gain_answer,
        "The same gains against how much better the baseline is on training than on test data. The "
        f"baseline overfits from the dashed line on ({figures.OVERFIT:g} points).",
        figures.gain_figure,
    ),
    Question(
        "match",
        "Does m-ARWP match SAM?",
        match_answer,
        "m-ARWP − SAM at default strengths, in points of test accuracy, with intervals. The band is "
        f"the margin of equivalence, ±{MARGIN:g} points.",
        figures.match_figure,
    ),
    Question(
        "survival",
        "What survives rounding to 4 and 3 bits and pruning of 50 and 80 %?",
        survival_answer,
        "Test accuracy after each change of the final weights, mean and standard deviation over seeds, at the "
        "default and at rise 0.2; BatchNorm statistics recomputed after the change.",
        figures.survival_figure,
        survival_table,
    ),
    Question(
        "transfer",
        "Does rise transfer better than ratio?",
        transfer_answer,
        "RWP in the trials: points of validation accuracy gained over the baseline by one strength, a "
        f"line for each setting. Losses of more than {-figures.FLOOR:g} points are drawn at the lower edge.",
        figures.transfer_figure,
    ),
)
