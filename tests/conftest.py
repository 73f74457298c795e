"""What the summary of a test run says about tests that were skipped for want of data."""

import re
from collections import Counter

NEEDS = "needs the real data in "
"""How the reason of such a skip begins (`tests/lab/conftest.py`); the folder's name follows."""


def pytest_terminal_summary(terminalreporter):
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    if line := what_is_missing(reasons):
        terminalreporter.section("data that this clone does not have")
        terminalreporter.line(line)


def what_is_missing(reasons):
    """One line about all tests that were skipped because a folder of real data is absent, or ""."""
    found = [match[1] for reason in reasons if (match := re.search(rf"{NEEDS}(\S+)", reason))]
    if not found:
        return ""
    folders = ", ".join(f"{name} ({count})" for name, count in sorted(Counter(found).items()))
    return (
        f"{len(found)} tests were skipped: they need the real images in {folders}. Put these folders "
        "into data/real, or name the folder that has them in STEPPE_TEST_DATA."
    )
