"""The page's answers: plain sentences, each computed from paired differences with its interval."""

from __future__ import annotations

from collections.abc import Callable

from steppe.lab.sentences import interval_words
from steppe.lab.statistics import ENOUGH, Difference, equivalent, mean_std
from steppe.lab.tables import join_words
from studies.definitions import Setting
from studies.findings import (
    Claim,
    Findings,
    adaptive,
    matching,
    mixing,
    ordering,
    places,
)
from studies.flatness import flatness_answer, radius_answer
from studies.plan import Part
from studies.tables import strength_words

MARGIN = 0.5
"""Points of accuracy within which two methods match."""
IDLE = 0.98
"""Where the median adaptive factor stays above this, the adaptive form does nothing."""
LITTLE = 5.0
"""Points from training to test accuracy below which there is little to gain."""

Answer = Callable[[Findings], list[str]]


def answers(findings: Findings) -> list[str]:
    """Markdown: a heading for each question that the study can speak to, and its sentences."""
    questions: dict[str, Answer] = {
        "Does the adaptive form help?": adaptive_answer,
        "Does mixing help beyond its second batch?": mixing_answer,
        "Does m-ARWP match SAM?": matching_answer,
        "Is the ordering the paper's?": ordering_answer,
        "Is the flattest model the best?": flatness_answer,
        "Is the random radius two orders above the adversarial one?": radius_answer,
        "Where did perturbation cost accuracy?": cost_answer,
    }
    found = []
    for question, answer in questions.items():
        if sentences := answer(findings):
            found += [f"**{question}**", "", *(f"- {sentence}" for sentence in sentences), ""]
    return found


def told(claim: Claim, difference: Difference) -> str:
    """`A − B is +1.20 [+0.80, +1.60] points (n = 20): better.`"""
    words = f"{claim.first} − {claim.second} is {interval_words(difference, 2)} points"
    words += f" (n = {difference.n})"
    if difference.n < ENOUGH:
        least = "" if difference.n < 2 else f"; one below {difference.smallest:.2f} would not show"
        return f"{words}: too few seeds for a verdict{least}."
    if difference.verdict == "no difference seen":
        return f"{words}: no difference seen; one below {difference.smallest:.2f} would not show."
    return f"{words}: {difference.verdict}."


def adaptive_answer(findings: Findings) -> list[str]:
    """ARWP against RWP, m-ARWP against m-RWP, and whether the factor left 1 at all."""
    found = []
    for setting, part, place in places(findings):
        parts = []
        for pair in adaptive(setting):
            claim, difference = findings.difference(setting, part, pair)
            if difference is None:
                continue
            lowest = findings.lowest_factor(setting, part, claim.first)
            words = told(claim, difference) + strengths_differ(findings, setting, part, claim)
            parts.append(words + _factor_words(claim.first, lowest))
        if parts:
            found.append(f"{place}: {' '.join(parts)}")
    return found


def _factor_words(name: str, lowest: float | None) -> str:
    if lowest is None:
        return ""
    if lowest > IDLE:
        return (
            f" The median of {name}'s adaptive factor never fell below {lowest:.3f}: the adaptive "
            "form did nothing here."
        )
    return f" The median of {name}'s adaptive factor fell to {lowest:.3f}."


def mixing_answer(findings: Findings) -> list[str]:
    """m-ARWP against ARWP with the doubled batch, which has seen the same data."""
    found = []
    for setting, part, place in places(findings):
        claim, difference = findings.difference(setting, part, mixing(setting))
        if difference is None:
            continue
        words = told(claim, difference) + strengths_differ(findings, setting, part, claim)
        found.append(f"{place}: {words}")
    return found


def strengths_differ(findings: Findings, setting: Setting, part: Part, claim: Claim) -> str:
    """A sentence where not the method alone is another."""
    used = _strengths(findings, setting, part, claim)
    return "" if used[0] == used[1] else f" Their strengths differ too ({used[0]} and {used[1]})."


def _strengths(findings: Findings, setting: Setting, part: Part, claim: Claim) -> list[str]:
    return [strength_words(findings, setting, part, name) for name in (claim.first, claim.second)]


def matching_answer(findings: Findings) -> list[str]:
    """Only equivalence within the margin is a match; a missing difference is none."""
    found = []
    for setting, part, place in places(findings):
        claim, difference = findings.difference(setting, part, matching(setting))
        if difference is None:
            continue
        words = told(claim, difference)
        if difference.n >= ENOUGH:
            match = "yes" if matches(findings, claim) else "not shown"
            words += f" Equivalent within {MARGIN:g} points: {match}."
        found.append(f"{place}: {words}")
    return found


def matches(findings: Findings, claim: Claim) -> bool:
    """Whether the two are equivalent within the margin."""
    return equivalent(findings.pairs(claim), MARGIN)


def ordering_answer(findings: Findings) -> list[str]:
    """The steps of the paper's ordering, one by one, and the likely cause where one is reversed."""
    found = []
    for setting, part, place in places(findings):
        steps = [findings.difference(setting, part, pair) for pair in ordering(setting)]
        known = [(claim, difference) for claim, difference in steps if difference is not None]
        if not known:
            continue
        names = [known[0][0].second, *(claim.first for claim, _ in known)]
        ours = sorted(names, key=lambda name: findings.mean(setting, part, name))
        words = f"by means {' < '.join(ours)}."
        groups: dict[str, list[str]] = {}
        for claim, difference in known:
            step = f"{claim.second} < {claim.first} ({interval_words(difference, 2)})"
            groups.setdefault(difference.verdict, []).append(step)
        titles = {
            "better": "Of the paper's steps, seen here too",
            "worse": "Against the paper",
            "no difference seen": "No difference seen",
            "too few seeds": "Too few seeds for a verdict",
        }
        for verdict, title in titles.items():
            if verdict in groups:
                words += f" {title}: {join_words(groups[verdict])}."
        for claim, difference in known:
            if difference.verdict == "worse":
                words += f" {cause(findings, setting, part, claim)}"
        found.append(f"{place}: {words}")
    return found


def cause(findings: Findings, setting: Setting, part: Part, claim: Claim) -> str:
    """What these runs themselves show that may explain a step against the paper."""
    about = f"That {claim.first} is below {claim.second}"
    reasons = []
    for name in (claim.first, claim.second):
        if part != "defaults" or not findings.finished(setting, "tuned", name):
            continue
        before = strength_words(findings, setting, "defaults", name)
        after = strength_words(findings, setting, "tuned", name)
        if before != after:
            reasons.append(f"the validation split prefers {after} to {name}'s {before}")
    if part == "defaults" and reasons:
        _, tuned = findings.difference(setting, "tuned", (claim.first, claim.second))
        if tuned is not None:
            reasons.append(f"with tuned strengths the difference is {interval_words(tuned, 2)}")
    if (claim.first, claim.second) in adaptive(setting):
        used = _strengths(findings, setting, part, claim)
        noise = [_displacement(findings, setting, part, n) for n in (claim.first, claim.second)]
        if used[0] != used[1]:
            reasons.append(f"few trials chose their strengths apart ({used[0]} and {used[1]})")
        elif noise[0] < noise[1]:
            reasons.append(
                f"the adaptive factor leaves it less noise at the same ratio (‖eps‖/‖w‖ of "
                f"{noise[0]:.3f} against {noise[1]:.3f} on average)"
            )
    if claim.second == setting.plain and (decay := _tuned_decay(findings, setting, part)):
        reasons.append(decay)
    gap = _gap(findings, setting, part)
    if gap < LITTLE:
        reasons.append(
            f"{setting.plain} itself is only {gap:.1f} points worse on test than on training data, so that "
            "there is little to gain and noise costs"
        )
    if not reasons:
        return f"{about}: nothing measured here explains it."
    return f"{about}, likely because {join_words(reasons)}."


def _tuned_decay(findings: Findings, setting: Setting, part: Part) -> str:
    """What the methods do not share with plain training where that was tuned; else nothing."""
    lines = findings.lines(setting, part, setting.plain).values()
    recipe = setting.config.weight_decay
    for decay in {line.result.config.weight_decay for line in lines} - {recipe}:
        return (
            f"{setting.plain} has the weight decay {decay:g} that its trials chose and the methods "
            f"the recipe's {recipe:g}"
        )
    return ""


def _gap(findings: Findings, setting: Setting, part: Part) -> float:
    base = findings.finished(setting, part, setting.plain).values()
    return mean_std([result.score("train") - result.score("test") for result in base])[0]


def _displacement(findings: Findings, setting: Setting, part: Part, name: str) -> float:
    """‖eps‖/‖w‖, over the epochs and seeds."""
    results = findings.finished(setting, part, name).values()
    return mean_std([result.perturbation["displacement"] for result in results])[0]


def cost_answer(findings: Findings) -> list[str]:
    """Everything that is worse than plain training, and what collapsed."""
    found = []
    for setting, part, place in places(findings):
        base = setting.plain
        plain = {control.name for control in setting.controls if control.method == "sgd"}
        others = [name for name in findings.names(setting, part) if name not in {base, *plain}]
        lost, judged = [], 0
        for name in others:
            _, difference = findings.difference(setting, part, (name, base))
            if difference is None:
                continue
            judged += difference.n >= ENOUGH
            if difference.verdict == "worse":
                failed = findings.mean(setting, part, name) < findings.mean(setting, part, base) / 2
                words = ", it did not train" if failed else ""
                lost.append(f"{name} ({interval_words(difference, 2)}{words})")
        if lost:
            decay = _tuned_decay(findings, setting, part)
            words = f"{place}: worse than {base}: {join_words(lost)}."
            found.append(f"{words} There {decay}." if decay else words)
        elif judged:
            found.append(f"{place}: nowhere, of {judged} rows with five seeds or more.")
        diverged = [
            f"{name} on {count} seeds"
            for name in others
            if (
                count := len(findings.lines(setting, part, name))
                - len(findings.finished(setting, part, name))
            )
        ]
        if diverged:
            found.append(f"{place}: diverged: {join_words(diverged)}.")
    return found
