"""Made by docs/generate/stubs.py for type checkers."""

from meshtape.parallel.models import decoder as decoder
from meshtape.parallel.models import encoder as encoder
from meshtape.parallel.models import moe as moe
from meshtape.parallel.models.plans import Plan as Plan
from meshtape.parallel.models.plans import Stages as Stages

