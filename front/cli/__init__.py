"""The command ``meshtape``: one file for each group of its subcommands.

Imports all packages. Begin with main.py.
"""
