cdef class Recipe:
    cdef public object op, together, decomposed
    cdef public object wanted, saves, saved_at, pulls, needs, quick
    cdef public bint direct, floating, keeps_ans, keeps_avals, single
    cdef public int keeps
