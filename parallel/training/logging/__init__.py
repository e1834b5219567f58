"""Metrics, progress and reports of a training run.

Imports arrays. Begin with reporting.py.
"""
