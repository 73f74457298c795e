"""The summary of a test run names the data that skipped tests need."""

from tests.conftest import NEEDS, what_is_missing


def test_one_line_names_the_folders_and_how_many_tests_need_each():
    reasons = [f"Skipped: {NEEDS}cifar-10-batches-py"] * 2 + [f"Skipped: {NEEDS}photos"]
    line = what_is_missing([*reasons, "Skipped: no chromium on this machine"])
    assert line.startswith("3 tests were skipped: they need the real images in ")
    assert "cifar-10-batches-py (2), photos (1)" in line
    assert "STEPPE_TEST_DATA" in line
    assert "\n" not in line


def test_nothing_is_said_where_no_data_were_missing():
    assert what_is_missing(["Skipped: no chromium on this machine"]) == ""
