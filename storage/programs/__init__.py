"""Files of programs: encoding, validation and limits of memory.

Imports commit, readers, format, stores and base. Begin with program_file.py.
"""
