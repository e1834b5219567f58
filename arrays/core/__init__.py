"""The record of an op, the value it computes, and the one point through which every call goes.

Imports nothing of ours. Begin with op.py (the record), then dispatch.py.
"""
