"""Traces of functions: tracers, the values read beside the arguments, and guards that compare these at each call.

Imports arrays and tape. Begin with tracing.py, then captures.py and guards.py.
"""
