"""Every error that a user of meshtape can cause; see ``meshtape.arrays.errors``, which defines them."""

from .arrays.errors import *  # noqa: F403
