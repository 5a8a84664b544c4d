"""What tests compile runs for a moment: the time goes into compiling."""

import jax

# XLA before JAX 0.12 has two ways to write the code of a loop. The one that users have, the only
# one since, takes twice as long.
_TWO_WAYS = jax.__version_info__ < (0, 12)

# As a module in one piece: another worker has the other core.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if _TWO_WAYS:
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"

# For a CPU, where the program is what is tested: as users have it but for the level.
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if _TWO_WAYS else {}
