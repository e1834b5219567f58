"""Plans of data movement between shardings, as pure values, and their execution.

Imports sharding, collectives and base. Begin with plan.py, then schedule.py.
"""
