"""`python -m zero.plan`."""

from zero.plan.command import main

main()
