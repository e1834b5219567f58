"""Statistics: moments, quantiles, histograms, sets and interpolation.

Imports core, backends and ops. Begin with statistics.py.
"""
