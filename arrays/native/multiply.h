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
    const int level = widest >= 64 && __builtin_cpu_supports("x86-64-v4")   ? 4
                      : widest >= 32 && __builtin_cpu_supports("x86-64-v3") ? 3
                                                                            : 0;
    if (!level) Py_RETURN_NONE;
    View x, y, out;
    Product job;
    if (look(operands[0], 0, &x) && look(operands[1], 0, &y) && look(operands[2], 1, &out) && is_product(&x, &y, &out, &job)) {
        const Multiply multiply = x.kind == 'f' ? (level == 4 ? multiply_v4_f32 : multiply_v3_f32) : level == 4 ? multiply_v4_f64 : multiply_v3_f64;
        const ptrdiff_t deep = job.k < DEEP ? job.k : DEEP, columns = job.direct ? 0 : job.n < BLOCK ? job.n : BLOCK;
        char *room = PyMem_RawMalloc((DEEP * MOST_STRIP + deep * (columns + MOST_PANEL)) * x.itemsize + LINE);
        if (!room) return PyErr_NoMemory();
        PyThreadState *state = out.count * job.k < SMALL_PRODUCT ? NULL : PyEval_SaveThread();
        feclearexcept(FE_ALL_EXCEPT);
        /* A vector that lies in two lines takes two reads: a tenth of the time. */
        multiply_all(&job, multiply, &x, &y, &out, room + LINE - (uintptr_t)room % LINE);
        const int raised = fetestexcept(FE_ALL_EXCEPT);
        if (state) PyEval_RestoreThread(state);
        PyMem_RawFree(room);
        return heard_of(raised);
    }
#endif
    Py_RETURN_NONE;
}
