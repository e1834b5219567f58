"""Plans of data movement between shardings, as pure values, and their execution.

Imports sharding and base. Begin with plan.py.
"""
