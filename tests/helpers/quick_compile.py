"""Compiler flags for tests, whose programs run briefly and spend their time on compilation."""

import jax

# XLA before JAX 0.12 has two code generators for loops. The default, which is the only one in later
# versions, takes twice as long.
_TWO_WAYS = jax.__version_info__ < (0, 12)

# The module is compiled in one piece, because another worker uses the other core.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if _TWO_WAYS:
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"

# For tests of compiled CPU programs: the defaults of users except the optimization level.
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if _TWO_WAYS else {}
