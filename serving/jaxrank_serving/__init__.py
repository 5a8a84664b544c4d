"""Scores raw values with a bundle that `jaxrank export` wrote. Needs neither JAX nor jaxrank.

import jaxrank_serving

scorer = jaxrank_serving.load("/models/ads")
scores = scorer.score({"user": "u7", "hour": 12}, [{"ad": "a1"}, {"ad": "a2"}])
scores["click"]  # f64[2], a probability for each candidate
"""

from jaxrank_serving.delta.apply import apply_delta
from jaxrank_serving.errors import BundleError, RequestError
from jaxrank_serving.scorer import Counts, Scorer, load

__version__ = "0.1.0"
__all__ = ["BundleError", "Counts", "RequestError", "Scorer", "apply_delta", "load"]
