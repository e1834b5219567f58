"""The tape: a call recorded, its VJP plan, and the backward pass.

Imports arrays and rules. Begin with record.py, then backward.py and tape.py.
"""
