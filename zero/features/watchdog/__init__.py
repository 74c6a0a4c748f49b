"""Ranks that wait long look after the others; see watchdog.py."""

from zero.comm import link
from zero.features.watchdog.watchdog import Watchdog

link.watchers.append(Watchdog)
