"""The lab: data, models, training and comparison."""
