"""Compares runs on the same rows: metrics, slices and paired differences with intervals."""
