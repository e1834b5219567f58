"""The pages of the browser.

Imports model. Begin with frame.py, then view_checkpoint.py.
"""
