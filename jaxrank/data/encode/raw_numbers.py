"""The inverse of the transform of numbers."""

import numpy as np

from jaxrank.features import Dense


def raw_numbers(stored: np.ndarray, feature: Dense) -> np.ndarray:
    """Returns f64[n], the raw numbers of a stored column, to about six digits.

    A missing number without an indicator reads as the mean of the feature.
    """
    values = stored.astype(np.float64) * feature.std + feature.mean
    if feature.log:
        values = np.copysign(np.expm1(np.abs(values)), values)
    # Rounding hides the error of the transform, so that equal raw numbers stay equal.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        digits = 5 - np.floor(np.log10(np.maximum(np.abs(values), 1e-4 * feature.std)))
        scale = 10.0 ** np.clip(digits, -300, 300)
        rounded = np.round(values * scale) / scale
    return np.where(np.isfinite(rounded), rounded, values)
