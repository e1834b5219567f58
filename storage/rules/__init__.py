"""Key rules: text, patterns, steps, and the lazy tensors that they make.

Imports readers and format. Begin with rules.py, then text.py.
"""
