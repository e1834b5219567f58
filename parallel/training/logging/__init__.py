"""Metrics, progress and reports of a training run.

Imports arrays, mesh and ``training.job``. Begin with reporting.py.
"""
