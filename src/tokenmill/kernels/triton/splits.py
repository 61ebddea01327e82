"""Where the contexts of decodes are split among the programs of a GPU, whatever the batch and the length.

|256|256| ... 16 of them |512|512| ... 16 of them |1024| ...      keys of split 0, 1, ... of every request
"""

from __future__ import annotations

import numpy as np

SPLIT_KEYS = 256
# After so many splits they are twice as long.
LEVEL_SPLITS = 16
SPLIT_ENDS = np.cumsum(SPLIT_KEYS << np.arange(10 * LEVEL_SPLITS) // LEVEL_SPLITS).astype(np.int32)
# Behind the sum of a part: its highest score, its total weight, and what keeps sums aligned.
PART_EXTRA = 4
