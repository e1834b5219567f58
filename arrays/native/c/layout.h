/* How the operands of a chain lie beside each other: rows of elements that lie together, or are one number, repeated over outer
   dimensions in which an operand has strides of its own. */

#define MOST_DIMENSIONS 16
#define SHORTEST_ROW 16 /* elements; shorter rows gain nothing over NumPy's own loops */

typedef struct {
    int ndim;
    ptrdiff_t shape[MOST_DIMENSIONS];
    ptrdiff_t stride[MOST_SLOTS][MOST_DIMENSIONS]; /* bytes */
} Layout;

/* The shape of all: that of the result. */
static int lay_out(Layout *layout, const View *result) {
    if (result->ndim > MOST_DIMENSIONS) return 0;
    layout->ndim = result->ndim;
    for (int d = 0; d < result->ndim; d++) layout->shape[d] = result->shape[d];
    return 1;
}

/* Whether an operand has this shape, or (unless `whole`) can be broadcast to it. */
static int place(Layout *layout, Py_ssize_t j, const View *v, int whole) {
    const int lacks = layout->ndim - v->ndim;
    if (lacks < 0 || (whole && lacks)) return 0;
    for (int d = 0; d < layout->ndim; d++) {
        const ptrdiff_t n = d < lacks ? 1 : v->shape[d - lacks];
        if (n != layout->shape[d] && (whole || n != 1)) return 0;
        layout->stride[j][d] = n == 1 ? 0 : v->strides[d - lacks];
        if (layout->stride[j][d] % v->itemsize) return 0;
    }
    return 1;
}

/* Dimensions made one where no operand tells them apart. Returns how many elements there are. */
static ptrdiff_t join(Layout *layout, int slots) {
    ptrdiff_t all = 1;
    int last = -1; /* of the dimensions that are left */
    for (int d = 0; d < layout->ndim; d++) {
        const ptrdiff_t n = layout->shape[d];
        all *= n;
        if (n == 1) continue;
        int same = last >= 0;
        for (int j = 0; same && j < slots; j++) same = layout->stride[j][last] == layout->stride[j][d] * n;
        if (same) layout->shape[last] *= n;
        else layout->shape[++last] = n;
        for (int j = 0; j < slots; j++) layout->stride[j][last] = layout->stride[j][d];
    }
    layout->ndim = last + 1;
    return all;
}

static int has_rows(const Layout *layout, int slots, ptrdiff_t width) {
    const int inner = layout->ndim - 1;
    if (inner < 0) return 1;
    if (inner && layout->shape[inner] < SHORTEST_ROW) return 0;
    for (int j = 0; j < slots; j++)
        if (layout->stride[j][inner] && layout->stride[j][inner] != width) return 0;
    return 1;
}

static void run_rows(Chain *chain, const Layout *layout, void (*run)(const Chain *, ptrdiff_t, ptrdiff_t)) {
    ptrdiff_t at[MOST_DIMENSIONS] = {0};
    const int inner = layout->ndim - 1;
    for (int j = 0; j < chain->slots; j++) chain->one[j] = inner >= 0 && !layout->stride[j][inner];
    for (;;) {
        run(chain, 0, inner < 0 ? 1 : layout->shape[inner]);
        int d = inner - 1;
        for (; d >= 0; d--) {
            for (int j = 0; j < chain->slots; j++) chain->at[j] = (char *)chain->at[j] + layout->stride[j][d];
            if (++at[d] < layout->shape[d]) break;
            for (int j = 0; j < chain->slots; j++) chain->at[j] = (char *)chain->at[j] - at[d] * layout->stride[j][d];
            at[d] = 0;
        }
        if (d < 0) break;
    }
}
