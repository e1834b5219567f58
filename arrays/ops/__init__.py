"""The array functions of the standard: creation, elements, products, reductions, sorting.

Imports core and backends. Begin with elementwise.py.
"""
