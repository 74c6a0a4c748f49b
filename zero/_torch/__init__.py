"""What differs between torch versions, and every name of torch's that is private. No other folder uses either.

Supported is torch 2.11 and what came after it; the suite is run with 2.11, 2.13 (on which `zero` is developed) and
`NEWEST_TESTED`. A private name may change with any version, so each has a name of ours, which says what it is for. To
try `zero` with a newer torch, look through this folder.
"""

import torch

from zero._torch.namesakes import refuse_mixtures
from zero._torch.telling import warn_user

refuse_mixtures()

NEWEST_TESTED = (2, 15)

if tuple(map(int, torch.__version__.split(".")[:2])) > NEWEST_TESTED:
    tested = ".".join(map(str, NEWEST_TESTED))
    warn_user(
        f"torch {torch.__version__} is newer than {tested}, the newest that this version of zero was tested with. "
        "Compare a few steps with DistributedDataParallel, and look for a newer zero."
    )
