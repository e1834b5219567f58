from meshtape.arrays._core cimport Value
from meshtape.autodiff.recipe cimport Recipe


cdef class Recording:
    cdef public list _records
    cdef public set _live
