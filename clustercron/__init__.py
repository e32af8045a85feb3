"""Run a crontab line once across a fleet: one tick, one run."""

# A literal: importlib.metadata would cost more start-up than the rest of a lost claim.
__version__ = "0.1.0"
