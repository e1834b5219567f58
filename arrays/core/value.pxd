# Fields that compiled code reads at a fixed place. Read by Cython when a wheel is built, by nothing else.

cdef class Value:
    cdef public object _buf
    cdef public object _id


cdef class Now:
    cdef public tuple recorders
    cdef public object origin
    cdef public object site
    cdef public object device
