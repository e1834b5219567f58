/* Kernels for arrays in the memory of the CPU: what NumPy needs several passes for, in one.

The Python side of each is an entry of KERNELS below: its name, and a letter for each operand that says what it is. A call checks
all of them, and answers False where the kernel does not take them; nothing is written then. The interpreter is free meanwhile.

Operands are NumPy's arrays, and are looked at through its C interface: through Python's buffer protocol each look takes as long as a
small kernel. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
#include <numpy/npy_math.h>
#include <numpy/ufuncobject.h>
#include <fenv.h>
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Compiled several times, and chosen by what the processor can when the module is loaded, where compiler and loader know how. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__) && defined(__GNUC__) && \
    __GNUC__ >= 12 && !defined(__INTEL_COMPILER)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#if defined(_MSC_VER)
#define INLINE __forceinline
#else
#define INLINE inline __attribute__((always_inline))
#endif

/* Before a loop over the elements of a row: what one pass writes, no other reads. */
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define EACH _Pragma("GCC ivdep")
#else
#define EACH
#endif

#define MOST_OPERANDS 6

typedef struct {
    void *at[MOST_OPERANDS];
    ptrdiff_t width, chunk; /* elements of a row; rows that share a row of partial sums */
    ptrdiff_t stride;       /* from row to row of the first operand: 0 where all are the same */
    ptrdiff_t period;       /* rows of a table */
    double value;
    int64_t ignored;
    int flag, repeated; /* repeated: the first operand is one number */
    int *raised;        /* what NumPy warns of, or raises: bits of NPY_FPE */
    char one[MOST_OPERANDS]; /* whether an operand is one number (e), or one row (m) */
} Job;

typedef void (*Kernel)(const Job *job, ptrdiff_t start, ptrdiff_t stop);

#define KERNEL(name) CLONES static void FN(name)(const Job *job, ptrdiff_t start, ptrdiff_t stop)

#define PIECE 256 /* elements: 2 KiB of float64, so that all slots of a long run are in a first cache */
#define MOST_LOCALS 6
#define MOST_SLOTS 24

typedef struct {
    void *at[MOST_SLOTS];
    char one[MOST_SLOTS]; /* whether a slot is one number for all of a row */
    const int32_t *steps; /* operation, slot that is written, and two that are read */
    int count, slots, locals;
} Chain;

#include "view.h"

#define IS_FLOAT
#include "lanes.h"
#include "pointwise.h"
#include "rows.h"
#include "chain.h"
#include "undefine.h"
#include "lanes.h"
#include "pointwise.h"
#include "rows.h"
#include "chain.h"
#include "stream.h"

typedef struct {
    const char *name;
    /* g, s: a cotangent of every element, or of every row, or one number for all. x: every element. w: one row. l: int64, one a row.
       n: one number a row. e: every element, or one number for all. m: a truth value for every element, or for one row that all rows
       have. h: a table of rows of half the elements. c: one number for each channel, of which `ignored` numbers lie together in a row.
       Written: o, every element; r, one number a row; p, a row for each chunk of rows; q, one number for each channel of a row. */
    const char *operands;
    Kernel f32, f64;
} Entry;

#define ENTRY(name, operands) {#name, operands, name##_f32, name##_f64}

static const Entry KERNELS[] = {
    ENTRY(layer_norm, "xwwo"),
    ENTRY(layer_norm_backward, "gxwopp"),
    ENTRY(rms_norm, "xwo"),
    ENTRY(rms_norm_backward, "gxwop"),
    ENTRY(group_norm, "xcco"),
    ENTRY(group_norm_backward, "gxcoqq"),
    ENTRY(cumulative_prod_backward, "gxo"),
    ENTRY(softmax, "xo"),
    ENTRY(softmax_of_rows, "xorr"),
    ENTRY(softmax_backward, "gxo"),
    ENTRY(log_softmax, "xo"),
    ENTRY(log_softmax_backward, "gxo"),
    ENTRY(cross_entropy, "xlrrr"),
    ENTRY(cross_entropy_backward, "sxlnno"),
    ENTRY(gelu, "xo"),
    ENTRY(gelu_backward, "gxo"),
    ENTRY(sigmoid, "xo"),
    ENTRY(power, "xo"),
    ENTRY(swiglu, "gxo"),
    ENTRY(swiglu_backward, "gxxo"),
    ENTRY(tanh_backward, "gxo"),
    ENTRY(sigmoid_backward, "gxo"),
    ENTRY(relu_backward, "gxo"),
    ENTRY(add_product, "xo"),
    ENTRY(where, "eemo"),
    ENTRY(rotary_embedding, "xhho"),
};

#define COUNT ((Py_ssize_t)(sizeof KERNELS / sizeof *KERNELS))

#include "layout.h"

/* Below so many elements, handing the interpreter to others costs more than they gain. */
#define SMALL 8192

static int is_one_number(const View *v) {
    for (int d = 0; d < v->ndim; d++)
        if (v->strides[d] && v->shape[d] != 1) return 0;
    return v->count != 0;
}

/* Whether the operand is what the letter says, of `rows` rows; notes in `one` where it is less. */
static int fits(const View *v, char letter, char kind, Job *job, Py_ssize_t rows, char *one) {
    const Py_ssize_t count = v->count, chunks = (rows + job->chunk - 1) / job->chunk;
    if (v->kind != (letter == 'l' ? 'l' : letter == 'm' ? '?' : kind)) return 0;
    switch (letter) {
    case 'g':
    case 's':
        if (count != (letter == 'g' ? rows * job->width : rows)) return 0;
        if (count > 1 && is_one_number(v)) return job->repeated = 1;
        break;
    case 'x':
    case 'o':
        if (count != rows * job->width) return 0;
        break;
    case 'w':
        if (count != job->width) return 0;
        break;
    case 'e':
        if (count == rows * job->width && count > 1 && is_one_number(v)) return *one = 1;
        /* fall through */
    case 'm':
        if (count == rows * job->width) break;
        if (count != (letter == 'e' ? 1 : job->width)) return 0;
        *one = 1;
        break;
    case 'h':
        if (job->width < 2 || job->width % 2 || !count || count % (job->width / 2)) return 0;
        job->period = count / (job->width / 2);
        break;
    case 'c': {
        const int64_t each = job->ignored;
        if (each < 1 || job->width % each || !count || count % (job->width / each)) return 0;
        const ptrdiff_t period = count / (job->width / each);
        if (job->period && job->period != period) return 0;
        job->period = period;
        break;
    }
    case 'q':
        if (count * job->ignored != rows * job->width) return 0;
        break;
    case 'p':
        if (count != chunks * job->width) return 0;
        break;
    default:
        if (count != rows) return 0;
    }
    return is_whole(v);
}

PyDoc_STRVAR(call_doc,
             "call(kernel, operands, rows, width, start, stop, chunk, value, flag, ignored) -> bool\n\n"
             "Run a kernel, by its number, over rows start ... stop. False, and nothing is done, where it does not take the operands.");

static PyObject *call(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_ssize_t number, rows, width, start, stop, chunk;
    long long ignored;
    int flag, raised = 0;
    double value;
    PyObject *operands;
    if (!PyArg_ParseTuple(args, "nO!nnnnndiL", &number, &PyTuple_Type, &operands, &rows, &width, &start, &stop, &chunk, &value, &flag,
                          &ignored))
        return NULL;
    if (number < 0 || number >= COUNT || rows < 0 || width < 0 || chunk < 1 || start < 0 || stop > rows || start % chunk)
        return PyErr_Format(PyExc_ValueError, "no such kernel, or no such rows");
    const Entry *entry = &KERNELS[number];
    const Py_ssize_t count = PyTuple_GET_SIZE(operands);
    if (count != (Py_ssize_t)strlen(entry->operands))
        return PyErr_Format(PyExc_TypeError, "%s takes %d operands, got %zd", entry->name, (int)strlen(entry->operands), count);
    Job job = {.width = width, .chunk = chunk, .value = value, .ignored = ignored, .flag = flag, .raised = &raised};
    View v = {0};
    Py_ssize_t itemsize = 0; /* of the first operand */
    int good = 1;
    char kind = 0;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        const char letter = entry->operands[i];
        if (!(good = look(PyTuple_GET_ITEM(operands, i), strchr("orpq", letter) != NULL, &v))) break;
        if (!kind) {
            kind = v.kind == 'f' || v.kind == 'd' ? v.kind : 'x';
            itemsize = v.itemsize;
        }
        good = fits(&v, letter, kind, &job, rows, &job.one[i]);
        job.at[i] = v.buf;
    }
    void *row = NULL;
    job.stride = job.repeated ? 0 : width;
    if (good && job.repeated && entry->operands[0] == 'g' && width > 1) { /* one row of the number, which stays in cache */
        row = PyMem_RawMalloc(width * itemsize);
        if (!row) return PyErr_NoMemory();
        for (Py_ssize_t k = 0; k < width; k++) memcpy((char *)row + k * itemsize, job.at[0], itemsize);
        job.at[0] = row;
    }
    if (good) {
        const Kernel kernel = kind == 'f' ? entry->f32 : entry->f64;
        if ((stop - start) * (width ? width : 1) < SMALL) {
            kernel(&job, start, stop);
        } else {
            Py_BEGIN_ALLOW_THREADS;
            kernel(&job, start, stop);
            Py_END_ALLOW_THREADS;
        }
    }
    PyMem_RawFree(row);
    if (raised && PyUFunc_GiveFloatingpointErrors(entry->name, raised) < 0) return NULL;
    return PyBool_FromLong(good);
}

#define WARNED_OF (FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW | FE_DIVBYZERO)

static PyObject *heard_of(int raised) {
    return PyLong_FromLong((raised & FE_INVALID ? 1 : 0) + (raised & FE_OVERFLOW ? 2 : 0) + (raised & FE_UNDERFLOW ? 4 : 0) +
                           (raised & FE_DIVBYZERO ? 8 : 0));
}

/* Whether the steps read and write slots that there are, and write none of the first `read`. */
static int are_steps(const Chain *chain, Py_ssize_t bytes, Py_ssize_t read) {
    const int32_t all = chain->slots + chain->locals;
    if (bytes % (4 * sizeof(int32_t)) || (uintptr_t)chain->steps % sizeof(int32_t)) return 0;
    for (const int32_t *s = chain->steps, *end = s + 4 * chain->count; s < end; s += 4)
        if (s[0] < 0 || s[0] > 7 || s[1] < read || s[1] >= all || s[2] < 0 || s[2] >= all || s[3] < 0 || s[3] >= all) return 0;
    return 1;
}

PyDoc_STRVAR(chain_doc, "chain(steps, operands, read, locals) -> int | None\n\n"
                        "Run elementwise steps on operands, of which the first `read` are read and broadcast, and the others written. Slots\n"
                        "after them are scratch. None, and nothing is done, where the operands are not of one dtype, or what is written\n"
                        "has gaps, or what is read has them between the elements of a row. Else what has happened on the way, perhaps in\n"
                        "scratch: 1 an invalid operation, 2 an overflow, 4 an underflow, 8 a division by zero.");

static PyObject *run_chain(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer steps;
    View v;
    PyObject *operands;
    Py_ssize_t read;
    Chain chain = {0};
    if (!PyArg_ParseTuple(args, "y*O!ni", &steps, &PyTuple_Type, &operands, &read, &chain.locals)) return NULL;
    const Py_ssize_t count = PyTuple_GET_SIZE(operands);
    chain.steps = steps.buf, chain.count = (int)(steps.len / (4 * sizeof(int32_t))), chain.slots = (int)count;
    if (count > MOST_SLOTS || chain.locals < 0 || chain.locals > MOST_LOCALS || read < 0 || read >= count ||
        !are_steps(&chain, steps.len, read)) {
        PyBuffer_Release(&steps);
        return PyErr_Format(PyExc_ValueError, "no such steps");
    }
    int good = 1, raised = 0;
    Layout layout;
    layout.ndim = 0;
    char kind = 0;
    for (Py_ssize_t j = count; good && j--;) { /* results first: they have the shape */
        if (!(good = look(PyTuple_GET_ITEM(operands, j), j >= read, &v))) break;
        if (!kind) {
            kind = v.kind == 'f' ? 'f' : 'd';
            good = lay_out(&layout, &v);
        }
        good = good && v.kind == kind && (j < read || is_whole(&v)) && place(&layout, j, &v, j >= read);
        chain.at[j] = v.buf;
    }
    if (good) {
        const ptrdiff_t width = kind == 'f' ? sizeof(float) : sizeof(double);
        const ptrdiff_t n = join(&layout, (int)count);
        good = n == 0 || has_rows(&layout, (int)count, width);
        if (good && n) {
            PyThreadState *state = n < SMALL ? NULL : PyEval_SaveThread();
            feclearexcept(FE_ALL_EXCEPT);
            run_rows(&chain, &layout, kind == 'f' ? chain_f32 : chain_f64);
            raised = fetestexcept(WARNED_OF);
            if (state) PyEval_RestoreThread(state);
        }
    }
    PyBuffer_Release(&steps);
    if (good) return heard_of(raised);
    Py_RETURN_NONE;
}

/* Shorter runs gain nothing: the system's copy of them ends sooner than the lines at both ends of a run are put together. */
#define SHORTEST_RUN 512

PyDoc_STRVAR(stream_doc, "stream(to, source) -> bool\n\n"
                         "Copy an array to another of its shape and item size, past the caches. False, and nothing is done, where they\n"
                         "have no long runs of bytes in common.");

static PyObject *stream(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *into, *source;
    View to, from;
    size_t run;
    int outer;
    if (!PyArg_ParseTuple(args, "OO", &into, &source)) return NULL;
    if (!look(into, 1, &to) || !look(source, 0, &from)) Py_RETURN_FALSE;
    /* Bytes that refer to objects have to be counted. */
    if (PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)into)) || PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)source)))
        Py_RETURN_FALSE;
    const int good = stream_layout(&to, &from, &run, &outer) && run >= SHORTEST_RUN;
    if (good && to.count) {
        Py_BEGIN_ALLOW_THREADS;
        stream_copy(&to, &from, run, outer);
        Py_END_ALLOW_THREADS;
    }
    return PyBool_FromLong(good);
}

CLONES static int any_from(const uint64_t *x, ptrdiff_t n, uint64_t limit) {
    uint64_t found = 0;
    for (ptrdiff_t k = 0; k < n; k++) found |= x[k] >= limit;
    return found != 0;
}

PyDoc_STRVAR(below_doc, "below(x, limit) -> bool | None\n\n"
                        "Whether all of the int64 numbers are 0 or more, and less than `limit`; None for what are no int64 without gaps.");

static PyObject *below(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *operand;
    View x;
    long long limit;
    if (!PyArg_ParseTuple(args, "OL", &operand, &limit)) return NULL;
    if (!look(operand, 0, &x) || x.kind != 'l' || !is_whole(&x) || limit < 0) Py_RETURN_NONE;
    /* Seen without their sign, negative numbers are the largest. */
    return PyBool_FromLong(!any_from((const uint64_t *)x.buf, x.count, limit));
}

static PyMethodDef METHODS[] = {{"call", call, METH_VARARGS, call_doc},
                                {"below", below, METH_VARARGS, below_doc},
                                {"chain", run_chain, METH_VARARGS, chain_doc},
                                {"stream", stream, METH_VARARGS, stream_doc},
                                {NULL, NULL, 0, NULL}};

static int fill(PyObject *module) {
    if (PyArray_ImportNumPyAPI() < 0 || PyUFunc_ImportUFuncAPI() < 0 || PyModule_AddIntMacro(module, MOST_LOCALS) < 0 || PyModule_AddIntMacro(module, MOST_SLOTS) < 0)
        return -1;
    PyObject *names = PyTuple_New(COUNT);
    if (!names) return -1;
    for (Py_ssize_t i = 0; i < COUNT; i++) {
        PyObject *name = PyUnicode_FromString(KERNELS[i].name);
        if (!name) {
            Py_DECREF(names);
            return -1;
        }
        PyTuple_SET_ITEM(names, i, name);
    }
    const int failed = PyModule_AddObjectRef(module, "KERNELS", names);
    Py_DECREF(names);
    return failed;
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};

static struct PyModuleDef DEFINITION = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_kernels",
    .m_doc = "Kernels for arrays in the memory of the CPU.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&DEFINITION); }
