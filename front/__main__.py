"""``python -m meshtape`` is the command line."""

from .cli.main import main

main(prog_name="meshtape")
