"""Starts the ranks' fork server at once: it imports torch while pytest still collects."""

import ranks

ranks.start()
