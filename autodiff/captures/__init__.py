"""The values that a traced function reads beside its arguments, and guards that compare them at each call.

Imports arrays. Begin with captures.py, then guards.py.
"""
