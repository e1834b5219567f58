/* What kernels know of an operand: its memory, its layout, and what its elements are. */

typedef struct {
    char *buf;
    const npy_intp *shape, *strides; /* bytes */
    npy_intp itemsize, count;
    int ndim;
    char kind; /* f float32, d float64, l int64, ? a truth value, 0 anything else */
} View;

static char kind_of(const PyArray_Descr *dtype) {
    if (!PyArray_ISNBO(dtype->byteorder)) return 0;
    switch (dtype->type_num) {
    case NPY_FLOAT: return 'f';
    case NPY_DOUBLE: return 'd';
    case NPY_BOOL: return '?';
    case NPY_LONG:
    case NPY_LONGLONG: return PyDataType_ELSIZE(dtype) == 8 ? 'l' : 0;
    default: return 0;
    }
}

/* A scalar of NumPy's as an array without dimensions: sums and the like are those. */
static int look_at_number(PyObject *object, View *v) {
    if (PyArray_IsScalar(object, Float))
        *v = (View){.buf = (char *)&PyArrayScalar_VAL(object, Float), .itemsize = sizeof(npy_float), .count = 1, .kind = 'f'};
    else if (PyArray_IsScalar(object, Double))
        *v = (View){.buf = (char *)&PyArrayScalar_VAL(object, Double), .itemsize = sizeof(npy_double), .count = 1, .kind = 'd'};
    else return 0;
    return 1;
}

/* Whether the object is an array whose elements lie as they should, and may be written where that is asked. */
static int look(PyObject *object, int written, View *v) {
    if (!PyArray_Check(object)) return !written && look_at_number(object, v); /* else a traced value, a list */
    PyArrayObject *array = (PyArrayObject *)object;
    if (written && !PyArray_ISWRITEABLE(array)) return 0;
    *v = (View){.buf = PyArray_BYTES(array),
                .shape = PyArray_DIMS(array),
                .strides = PyArray_STRIDES(array),
                .itemsize = PyArray_ITEMSIZE(array),
                .count = PyArray_SIZE(array),
                .ndim = PyArray_NDIM(array),
                .kind = kind_of(PyArray_DESCR(array))};
    return PyArray_ISALIGNED(array);
}

/* Whether the elements lie one after the other. */
static int is_whole(const View *v) {
    npy_intp step = v->itemsize;
    if (!v->count) return 1;
    for (int d = v->ndim; d--; step *= v->shape[d])
        if (v->shape[d] != 1 && v->strides[d] != step) return 0;
    return 1;
}
