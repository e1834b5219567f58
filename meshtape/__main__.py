"""``python -m meshtape`` is the command line."""

from .cli import main

main(prog_name="meshtape")
