"""Values that fields and flags may have where more than one module looks. Imports nothing."""

COMPRESSIONS = ("", "lz4", "zstd")  # data.compression; empty: none
ORDERS = ("shuffled", "days")  # data.order
OVERFLOWS = ("error", "truncate")  # data.on_overflow
PLACEMENTS = ("auto", "rows", "replicated")  # embedding.placement
ON_ERROR = ("error", "skip")  # --on-error
LEAST_EPS = 1e-37  # of Adam, for layers and tables: less is 0 in float32
MOST_DECAY = 0.99999  # b1 and b2 of Adam: of more, float32 has 1 - b by more than 1% wrong, or 0
