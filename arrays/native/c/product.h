/* Products of matrices of one dtype, with vectors of VECTOR bytes and tiles of MOST_ROWS rows; PRODUCT(name) names what is defined.

A tile of the result, MOST_ROWS rows of two vectors, stays in registers while one step of k after the other is added to it: the scheme
of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (ACM TOMS 34:3, 2008). What a BLAS does for matrices of
any size, and what costs small ones dearly, is left out where it gains nothing: rows of the right operand that lie in the second cache
anyway are read where they are, the left operand is copied only where its columns are what lies together, and no result is cleared first.

Each element of a result is the sum over k in one order, whatever the shapes, the strides and the vectors are: a part of a product has
the bits of the whole. */

typedef REAL PRODUCT(vector) __attribute__((vector_size(VECTOR), aligned(sizeof(REAL)), may_alias));
typedef INTEGER PRODUCT(places) __attribute__((vector_size(VECTOR)));

#define V PRODUCT(vector)
#define WIDE (VECTOR / (int)sizeof(REAL)) /* elements of a vector */
#define PANEL (2 * WIDE)                  /* columns of a tile */
#define STRIP ((MOST_ROWS + 7) / 8 * 8)   /* elements from column to column of a copied strip of the left operand */
#define AHEAD 8                           /* rows of the right operand that are asked for before their turn */

/* c (+)= the strip at `a`, whose rows lie `down` apart, times the panel at `b`, whose rows lie `step` apart; k is positive.

The places of twelve rows are more than there are registers: they are four, and `down` and twice that away from them. The empty statements
keep the compiler from counting with all twelve, and from copies of what it has in registers: 47 instructions a step where there were 53,
which shows (by 3 to 5 %) where another thread shares the core. */
#define TILE(rows)                                                                                                                         \
    static INLINE void PRODUCT(tile##rows)(ptrdiff_t k, const REAL *a, ptrdiff_t down, ptrdiff_t along, const REAL *b,                     \
                                           ptrdiff_t step, REAL *c, ptrdiff_t next, int adds) {                                            \
        V sum[rows][2];                                                                                                                    \
        for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = (V){0};                                                                     \
        const REAL *a1 = a + (rows > 3 ? 3 * down : 0), *a2 = a + (rows > 6 ? 6 * down : 0), *a3 = a + (rows > 9 ? 9 * down : 0);          \
        do {                                                                                                                               \
            const V left = *(const V *)b, right = *(const V *)(b + WIDE);                                                                  \
            __builtin_prefetch(b + AHEAD * step);                                                                                          \
            __builtin_prefetch(b + AHEAD * step + WIDE);                                                                                   \
            _Pragma("GCC unroll 12") for (int i = 0; i < rows; i++) {                                                                      \
                V x = (i < 3 ? a : i < 6 ? a1 : i < 9 ? a2 : a3)[i % 3 * down] - (V){0};                                                   \
                __asm__("" : "+v"(x));                                                                                                     \
                sum[i][0] += x * left;                                                                                                     \
                sum[i][1] += x * right;                                                                                                    \
            }                                                                                                                              \
            a += along, a1 += along, a2 += along, a3 += along, b += step;                                                                  \
            __asm__("" : "+r"(a), "+r"(a1), "+r"(a2), "+r"(a3), "+r"(b));                                                                  \
        } while (--k);                                                                                                                     \
        for (int i = 0; i < rows; i++)                                                                                                     \
            for (int j = 0; j < 2; j++) {                                                                                                  \
                V *to = (V *)(c + i * next + j * WIDE);                                                                                    \
                if (adds) sum[i][j] += *to;                                                                                                \
                *to = sum[i][j];                                                                                                           \
            }                                                                                                                              \
    }

#if MOST_ROWS == 12
#define EACH_HEIGHT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define EACH_HEIGHT(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif
EACH_HEIGHT(TILE)
#undef TILE

/* WIDE rows of `from` become columns of `to`: in each round pairs of vectors exchange what lies on the wrong side. */
static INLINE void PRODUCT(turn)(const REAL *from, ptrdiff_t down, REAL *to, ptrdiff_t next) {
    V x[WIDE];
    for (int i = 0; i < WIDE; i++) x[i] = *(const V *)(from + i * down);
    for (int s = 1; s < WIDE; s *= 2) {
        PRODUCT(places) low, high;
        for (int l = 0; l < WIDE; l++) {
            low[l] = l & s ? l - s + WIDE : l;
            high[l] = l & s ? l + WIDE : l + s;
        }
        for (int i = 0; i < WIDE; i++)
            if (!(i & s)) {
                const V a = x[i], b = x[i | s];
                x[i] = __builtin_shuffle(a, b, low);
                x[i | s] = __builtin_shuffle(a, b, high);
            }
    }
    for (int i = 0; i < WIDE; i++) *(V *)(to + i * next) = x[i];
}

/* `width` columns of the right operand, a panel of them or fewer; zeros stand in the places of the others. */
static INLINE void PRODUCT(copy_panel)(const REAL *b, ptrdiff_t br, ptrdiff_t bc, ptrdiff_t k, ptrdiff_t width, REAL *to) {
    ptrdiff_t p = 0;
    if (width == PANEL && bc == 1)
        for (; p < k; p++) memcpy(to + p * PANEL, b + p * br, PANEL * sizeof(REAL));
    else if (width == PANEL && br == 1)
        for (; p + WIDE <= k; p += WIDE)
            for (int h = 0; h < PANEL; h += WIDE) PRODUCT(turn)(b + p + h * bc, bc, to + p * PANEL + h, PANEL);
    for (; p < k; p++)
        for (ptrdiff_t j = 0; j < PANEL; j++) to[p * PANEL + j] = j < width ? b[p * br + j * bc] : 0;
}

/* `rows` rows of the left operand, whose columns are what lies together; `whole`: as many rows as a strip has room for are there. */
static INLINE void PRODUCT(copy_strip)(const REAL *a, ptrdiff_t ar, ptrdiff_t ac, ptrdiff_t k, ptrdiff_t rows, int whole, REAL *to) {
    if (whole)
        for (ptrdiff_t p = 0; p < k; p++) memcpy(to + p * STRIP, a + p * ac, STRIP * sizeof(REAL));
    else
        for (ptrdiff_t p = 0; p < k; p++)
            for (ptrdiff_t i = 0; i < rows; i++) to[p * STRIP + i] = a[p * ac + i * ar];
}

/* c = a times b. `room` is for DEEP columns of a strip, and as many rows of a block. */
WITH_VECTORS static void PRODUCT(multiply)(const Product *job, const void *left, const void *right, void *result, void *room) {
    const REAL *a = left, *b = right;
    REAL *c = result;
    const ptrdiff_t m = job->m, n = job->n, k = job->k, cr = job->cr, strips = (m + MOST_ROWS - 1) / MOST_ROWS;
    const ptrdiff_t passes = (k + DEEP - 1) / DEEP, most = (k + passes - 1) / passes;
    REAL *strip = room, *panels = strip + DEEP * STRIP, edge[MOST_ROWS * PANEL] = {0};
    for (ptrdiff_t q = 0; q < n; q += BLOCK) {
        const ptrdiff_t columns = n - q < BLOCK ? n - q : BLOCK;
        const ptrdiff_t direct = job->direct ? columns / PANEL * PANEL : 0; /* columns that are read where they are */
        for (ptrdiff_t p = 0; p < k; p += most) {
            const ptrdiff_t deep = k - p < most ? k - p : most;
            const REAL *from = b + p * job->br + q * job->bc;
            for (ptrdiff_t j = direct; j < columns; j += PANEL)
                PRODUCT(copy_panel)(from + j * job->bc, job->br, job->bc, deep, columns - j < PANEL ? columns - j : PANEL,
                                    panels + (j - direct) * deep);
            for (ptrdiff_t t = 0, i = 0, rows; t < strips; t++, i += rows) {
                rows = (m - i + strips - t - 1) / (strips - t); /* all about as high */
                const REAL *x = a + i * job->ar + p * job->ac;
                ptrdiff_t down = job->ar, along = job->ac;
                if (along != 1) {
                    PRODUCT(copy_strip)(x, down, along, deep, rows, down == 1 && i + STRIP <= m, strip);
                    x = strip, down = 1, along = STRIP;
                }
                for (ptrdiff_t j = 0; j < columns; j += PANEL) {
                    const ptrdiff_t width = columns - j < PANEL ? columns - j : PANEL;
                    const REAL *y = j < direct ? from + j : panels + (j - direct) * deep;
                    const ptrdiff_t step = j < direct ? job->br : PANEL;
                    REAL *to = c + i * cr + q + j, *out = width < PANEL ? edge : to;
                    const ptrdiff_t next = width < PANEL ? PANEL : cr;
                    if (width < PANEL && p)
                        for (ptrdiff_t r = 0; r < rows; r++) memcpy(edge + r * PANEL, to + r * cr, width * sizeof(REAL));
                    switch (rows) {
#define CASE(height) \
    case height: PRODUCT(tile##height)(deep, x, down, along, y, step, out, next, p > 0); break;
                        EACH_HEIGHT(CASE)
#undef CASE
                    }
                    if (width < PANEL)
                        for (ptrdiff_t r = 0; r < rows; r++) memcpy(to + r * cr, edge + r * PANEL, width * sizeof(REAL));
                }
            }
        }
    }
}

#undef EACH_HEIGHT
#undef V
#undef WIDE
#undef PANEL
#undef STRIP
#undef AHEAD
#undef PRODUCT
#undef VECTOR
#undef MOST_ROWS
#undef WITH_VECTORS
