"""Several forwards in one torch.autocast; see casts.py."""

from zero.features.autocast.casts import Casts
from zero.fsdp.events import makers

makers.append(Casts)
