"""An opened checkpoint as a mapping, and the places that hold many: numbered steps and branches.

Imports readers, format, stores and base. Begin with checkpoint.py.
"""
