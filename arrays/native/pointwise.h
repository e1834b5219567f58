/* Kernels over elements. */

#ifdef IS_FLOAT
/* One over the normal distribution function; the module `gelu` says where the polynomial is from. */
static INLINE float FN(odds)(float x) {
    const float t = x * x;
    float p = -3.5123417507776367e-09f;
    p = p * t + 2.6452667611920333e-07f;
    p = p * t + -7.92948867456289e-06f;
    p = p * t + 1.1061238910770044e-04f;
    p = p * t + 6.518995360238478e-05f;
    p = p * t + -7.266616821289062e-02f;
    p = p * t + -1.5957698822021484f;
    return 1 + FN(exponential)(p * x);
}
#endif

KERNEL(gelu) { /* x, out */
    const REAL *x = job->at[0];
    REAL *out = job->at[1];
#ifdef IS_FLOAT
    EACH for (ptrdiff_t k = start; k < stop; k++) out[k] = (x[k] < -40 ? -40 : x[k]) / FN(odds)(x[k]);
#else
    EACH for (ptrdiff_t k = start; k < stop; k++) out[k] = 0.5 * (x[k] < -40 ? -40 : x[k]) * (1 + erf(x[k] * 0.70710678118654752440));
#endif
}

static INLINE void FN(gelu_pull)(const Job *job, ptrdiff_t start, ptrdiff_t stop, const int step) {
    const REAL *g = job->at[0], *x = job->at[1];
    REAL *out = job->at[2];
    EACH for (ptrdiff_t k = start; k < stop; k++) {
        const REAL u = x[k] < -40 ? -40 : x[k], v = u > 40 ? 40 : u; /* beyond it an infinity would meet a density of 0 */
        const REAL density = FN(exponential)(LITERAL(-0.5) * v * v) * LITERAL(0.39894228040143267794);
#ifdef IS_FLOAT
        const REAL cdf = 1 / FN(odds)(v);
#else
        const REAL cdf = 0.5 * (1 + erf(v * 0.70710678118654752440));
#endif
        out[k] = g[k * step] * (cdf + v * density);
    }
}

KERNEL(gelu_backward) { /* g, x, out */
    if (job->repeated) FN(gelu_pull)(job, start, stop, 0);
    else FN(gelu_pull)(job, start, stop, 1);
}

KERNEL(sigmoid) { /* x, out: one exponential, of a number that is not positive, so that neither sign overflows */
    const REAL *x = job->at[0];
    REAL *out = job->at[1];
    EACH for (ptrdiff_t k = start; k < stop; k++) {
        const REAL v = x[k], e = FN(exponential)(v < 0 ? v : -v);
        out[k] = (v < 0 ? e : 1) / (1 + e);
    }
}

/* Derivatives of activations, from their results: g, y, out. */
#define PULL(name, slope)                                                                    \
    KERNEL(name) {                                                                           \
        const REAL *all = job->at[0], *ys = job->at[1];                                      \
        REAL *out = job->at[2];                                                              \
        if (job->repeated) {                                                                 \
            const REAL g = all[0];                                                           \
            EACH for (ptrdiff_t k = start; k < stop; k++) {                                  \
                const REAL y = ys[k];                                                        \
                out[k] = slope;                                                              \
            }                                                                                \
        } else {                                                                             \
            EACH for (ptrdiff_t k = start; k < stop; k++) {                                  \
                const REAL g = all[k], y = ys[k];                                            \
                out[k] = slope;                                                              \
            }                                                                                \
        }                                                                                    \
    }

PULL(tanh_backward, g * (1 - y * y))
PULL(sigmoid_backward, g * y * (1 - y))
PULL(relu_backward, y > 0 ? g : y == y ? 0 : y)
#undef PULL

KERNEL(where) { /* x, y, condition, out: NumPy takes a branch for each element, which costs ten times as much where it is guessed wrong */
    const ptrdiff_t n = job->width, run = job->one[2] ? n : (stop - start) * n;
    for (ptrdiff_t at = start * n; at < stop * n; at += run) {
        const REAL *x = (const REAL *)job->at[0] + (job->one[0] ? 0 : at), *y = (const REAL *)job->at[1] + (job->one[1] ? 0 : at);
        const unsigned char *c = (const unsigned char *)job->at[2] + (job->one[2] ? 0 : at);
        REAL *out = (REAL *)job->at[3] + at;
        const REAL a = *x, b = *y;
        if (job->one[0] && job->one[1]) EACH for (ptrdiff_t k = 0; k < run; k++) out[k] = c[k] ? a : b;
        else if (job->one[0]) EACH for (ptrdiff_t k = 0; k < run; k++) out[k] = c[k] ? a : y[k];
        else if (job->one[1]) EACH for (ptrdiff_t k = 0; k < run; k++) out[k] = c[k] ? x[k] : b;
        else EACH for (ptrdiff_t k = 0; k < run; k++) out[k] = c[k] ? x[k] : y[k];
    }
}
