"""The evidence: sets of comparisons whose every run is a line that is kept for good."""
