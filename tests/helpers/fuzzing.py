"""The number of random cases of each fuzz test.

Longer runs are `JAXRANK_FUZZ_CASES=10000 python -m pytest tests/fuzz`.
"""

import os

CASES = int(os.environ.get("JAXRANK_FUZZ_CASES", "100"))
