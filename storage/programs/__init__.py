"""Files of programs: encoding, validation and limits of memory.

Imports checkpoint, loading and saving. Begin with program_file.py.
"""
