"""Settings that PyTorch reads when it is imported, by whichever test file comes first."""

import os

from treeattn.bench.timer import QUIET

os.environ.update(QUIET)
