from meshtape.arrays.core.value cimport Value
from meshtape.autodiff.tape.vjp_plan cimport Recipe


cdef class Recording:
    cdef public list _records
    cdef public set _live
