/* Runs of elementwise steps, piece by piece: a piece passes through all of them while it is in the first cache.

Each step is a loop of its own over memory, with one rounding for each number: nothing is contracted across steps, and the bits are
those of NumPy's functions. */

#define BINARY(OP)                                                            \
    switch (form) {                                                           \
    case 0:                                                                   \
        EACH for (ptrdiff_t k = 0; k < m; k++) d[k] = a[k] OP b[k];           \
        break;                                                                \
    case 1:                                                                   \
        EACH for (ptrdiff_t k = 0; k < m; k++) d[k] = first OP b[k];          \
        break;                                                                \
    case 2:                                                                   \
        EACH for (ptrdiff_t k = 0; k < m; k++) d[k] = a[k] OP second;         \
        break;                                                                \
    default:                                                                  \
        for (ptrdiff_t k = 0; k < m; k++) d[k] = first OP second;             \
    }                                                                         \
    break;

#define UNARY(VALUE)                                                          \
    if (form) {                                                               \
        const REAL v = first;                                                 \
        for (ptrdiff_t k = 0; k < m; k++) d[k] = VALUE;                       \
    } else {                                                                  \
        EACH for (ptrdiff_t k = 0; k < m; k++) {                              \
            const REAL v = a[k];                                              \
            d[k] = VALUE;                                                     \
        }                                                                     \
    }                                                                         \
    break;

CLONES static void FN(chain)(const Chain *chain, ptrdiff_t start, ptrdiff_t stop) {
    REAL local[MOST_LOCALS][PIECE];
    REAL *at[MOST_SLOTS + MOST_LOCALS];
    for (int j = 0; j < chain->locals; j++) at[chain->slots + j] = local[j];
    for (ptrdiff_t i = start; i < stop; i += PIECE) {
        const ptrdiff_t m = stop - i < PIECE ? stop - i : PIECE;
        for (int j = 0; j < chain->slots; j++) at[j] = (REAL *)chain->at[j] + (chain->one[j] ? 0 : i);
        for (const int32_t *step = chain->steps, *end = step + 4 * chain->count; step < end; step += 4) {
            const int x = step[2], y = step[3];
            REAL *d = at[step[1]];
            const REAL *a = at[x], *b = at[y];
            const int form = (x < chain->slots && chain->one[x] ? 1 : 0) + (y < chain->slots && chain->one[y] ? 2 : 0);
            const REAL first = form & 1 ? a[0] : 0, second = form & 2 ? b[0] : 0;
            switch (step[0]) {
            case 0: BINARY(+)
            case 1: BINARY(-)
            case 2: BINARY(*)
            case 3: BINARY(/)
            case 4: UNARY(-v)
            case 5: UNARY(v * v)
            case 6: UNARY(SQRT(v))
            default: UNARY(1 / v)
            }
        }
    }
}

#undef BINARY
#undef UNARY
