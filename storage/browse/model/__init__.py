"""The facts that the browser of checkpoints shows, without a page.

Imports checkpoint and readers. Begin with inventory.py.
"""
