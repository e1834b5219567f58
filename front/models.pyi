"""Made by docs/generate/stubs.py for type checkers."""

from meshtape.parallel.models import decoder as decoder, encoder as encoder, moe as moe
from meshtape.parallel.models.plans import Plan as Plan, Stages as Stages

