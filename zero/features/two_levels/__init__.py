"""FSDP(optimizer_sharding="all"); see two_levels.py."""

from zero.features.two_levels.two_levels import Stale, over_all_ranks
from zero.fsdp.events import makers
from zero.shards.placement import optimizer_shardings

makers.append(Stale)
optimizer_shardings["all"] = over_all_ranks
