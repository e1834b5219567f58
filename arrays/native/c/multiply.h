/* Which products of matrices are computed here (see product.h), and on what. */

#if HAVE_PRODUCTS

#define MOST_BATCHES 8          /* dimensions before those of a matrix */
#define MOST_COPIED (1 << 20)   /* bytes of a right operand: what stays in a second cache */
#define MOST_STRIP 16           /* elements, see product.h */
#define MOST_PANEL 32
#define LINE 64                 /* bytes */
#define SMALL_PRODUCT (1 << 19) /* products of numbers; below, handing the interpreter to others costs more than they gain */

/* The matrix of a buffer in its last two dimensions, in elements; 0 where neither rows nor columns lie together. */
static int is_matrix(const View *v, ptrdiff_t *down, ptrdiff_t *along) {
    const int d = v->ndim - 2;
    for (int i = 0; i < v->ndim; i++)
        if (v->strides[i] % v->itemsize) return 0;
    *down = v->strides[d] / v->itemsize, *along = v->strides[d + 1] / v->itemsize;
    return *along == 1 || *down == 1;
}

/* The first byte of a buffer and the one after its last. */
static void extent(const View *v, const char **first, const char **end) {
    *first = v->buf, *end = *first + v->itemsize;
    for (int i = 0; i < v->ndim; i++) *(v->strides[i] < 0 ? first : end) += (v->shape[i] - 1) * v->strides[i];
}

static int overlap(const View *v, const View *w) {
    const char *a, *b, *c, *d;
    extent(v, &a, &b);
    extent(w, &c, &d);
    return a < d && c < b;
}

/* Whether it takes less time here than in a BLAS: measured against OpenBLAS 0.3.30 on one core of an Emerald Rapids, for float32 and float64
   (0.5 to 0.95 of its time where this says yes). Larger ones are a BLAS's own business; of narrow ones it copies nothing either. */
static int pays(const Product *job, Py_ssize_t bytes) {
    if (job->n < NARROWEST || job->k < 8 || job->k * job->n * bytes > MOST_COPIED) return 0;
    return job->bc == 1 ? job->m >= 8 : job->ac == 1 && job->m >= 32;
}

/* Whether out = x @ y is such a product: the same matrices in the same batches, nothing empty, and the result's rows without gaps. */
static int is_product(const View *x, const View *y, const View *out, Product *job) {
    const int d = x->ndim - 2;
    if (d < 0 || d > MOST_BATCHES || y->ndim != x->ndim || out->ndim != x->ndim) return 0;
    if ((x->kind != 'f' && x->kind != 'd') || y->kind != x->kind || out->kind != x->kind) return 0;
    if (!x->count || !y->count || !out->count || overlap(x, out) || overlap(y, out)) return 0;
    for (int i = 0; i < d; i++)
        if (x->shape[i] != y->shape[i] || x->shape[i] != out->shape[i]) return 0;
    job->m = x->shape[d], job->k = x->shape[d + 1], job->n = y->shape[d + 1];
    if (y->shape[d] != job->k || out->shape[d] != job->m || out->shape[d + 1] != job->n) return 0;
    ptrdiff_t one;
    if (!is_matrix(x, &job->ar, &job->ac) || !is_matrix(y, &job->br, &job->bc) || !is_matrix(out, &job->cr, &one) || one != 1)
        return 0;
    /* Rows that repeat, or overlap, would be written twice. */
    if (job->m > 1 && job->cr < job->n) return 0;
    /* Few rows do not pay for a copy. (Of many each step would go to another page, where a row is long.) */
    job->direct = job->bc == 1 && job->k >= 2 * job->m;
    return pays(job, x->itemsize);
}

typedef void (*Multiply)(const Product *, const void *, const void *, void *, void *);

static void multiply_all(const Product *job, Multiply multiply, const View *x, const View *y, const View *out, void *room) {
    const int d = x->ndim - 2;
    Py_ssize_t at[MOST_BATCHES] = {0};
    const char *a = x->buf, *b = y->buf;
    char *c = out->buf;
    for (;;) {
        multiply(job, a, b, c, room);
        int i = d - 1;
        for (; i >= 0; i--) {
            a += x->strides[i], b += y->strides[i], c += out->strides[i];
            if (++at[i] < x->shape[i]) break;
            a -= x->strides[i] * at[i], b -= y->strides[i] * at[i], c -= out->strides[i] * at[i];
            at[i] = 0;
        }
        if (i < 0) return;
    }
}

/* As which processor to multiply: 0 where nothing here knows how. */
static int level_of(int widest) {
    return widest >= 64 && __builtin_cpu_supports("x86-64-v4") ? 4 : widest >= 32 && __builtin_cpu_supports("x86-64-v3") ? 3 : 0;
}

/* out = x @ y. Returns what was raised on the way, -1 where this is no such product, and -2 where there is no memory. */
static int multiply_views(const View *x, const View *y, const View *out, int level) {
    Product job;
    if (!is_product(x, y, out, &job)) return -1;
    const Multiply multiply = x->kind == 'f' ? (level == 4 ? multiply_v4_f32 : multiply_v3_f32) : level == 4 ? multiply_v4_f64 : multiply_v3_f64;
    const ptrdiff_t deep = job.k < DEEP ? job.k : DEEP, columns = job.direct ? 0 : job.n < BLOCK ? job.n : BLOCK;
    char *room = PyMem_RawMalloc((DEEP * MOST_STRIP + deep * (columns + MOST_PANEL)) * x->itemsize + LINE);
    if (!room) return -2;
    PyThreadState *state = out->count * job.k < SMALL_PRODUCT ? NULL : PyEval_SaveThread();
    feclearexcept(FE_ALL_EXCEPT);
    /* A vector that lies in two lines takes two reads: a tenth of the time. */
    multiply_all(&job, multiply, x, y, out, room + LINE - (uintptr_t)room % LINE);
    const int raised = fetestexcept(WARNED_OF);
    if (state) PyEval_RestoreThread(state);
    PyMem_RawFree(room);
    return raised;
}
#endif

PyDoc_STRVAR(product_doc, "product(x, y, out, widest=64) -> int | None\n\n"
                          "out = x @ y for stacks of matrices. None, and nothing is done, where they are not of one dtype, or not in the\n"
                          "same batches, or neither rows nor columns lie together, or where a BLAS does it in less time. " HEARD_OF
                          " `widest`\nbounds the bytes of a vector, as a lesser processor would.");

static PyObject *product(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *operands[3];
    int widest = 64;
    if (!PyArg_ParseTuple(args, "OOO|i", &operands[0], &operands[1], &operands[2], &widest)) return NULL;
#if HAVE_PRODUCTS
    const int level = level_of(widest);
    View x, y, out;
    if (level && look(operands[0], 0, &x) && look(operands[1], 0, &y) && look(operands[2], 1, &out)) {
        const int raised = multiply_views(&x, &y, &out, level);
        if (raised >= 0) return heard_of(raised);
        if (raised == -2) return PyErr_NoMemory();
    }
#endif
    Py_RETURN_NONE;
}

PyDoc_STRVAR(matmul_doc, "matmul(x, y) -> array | tuple[array, int] | None\n\n"
                         "The same with a result of its own; what has happened on the way stands beside it, if anything has.");

static PyObject *matmul(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *left, *right;
    if (!PyArg_ParseTuple(args, "OO", &left, &right)) return NULL;
#if HAVE_PRODUCTS
    const int level = level_of(64);
    View x, y, to;
    if (level && look(left, 0, &x) && look(right, 0, &y) && x.ndim >= 2 && x.ndim == y.ndim && x.ndim <= MOST_BATCHES + 2 &&
        (x.kind == 'f' || x.kind == 'd')) {
        npy_intp shape[MOST_BATCHES + 2];
        for (int i = 0; i < x.ndim - 1; i++) shape[i] = x.shape[i];
        shape[x.ndim - 1] = y.shape[x.ndim - 1];
        PyObject *out = PyArray_SimpleNew(x.ndim, shape, x.kind == 'f' ? NPY_FLOAT : NPY_DOUBLE);
        if (!out) return NULL;
        const int raised = look(out, 1, &to) ? multiply_views(&x, &y, &to, level) : -1;
        if (!raised) return out;
        if (raised > 0) return Py_BuildValue("NN", out, heard_of(raised));
        Py_DECREF(out);
        if (raised == -2) return PyErr_NoMemory();
    }
#endif
    Py_RETURN_NONE;
}
