/* Kernels over elements. */

#ifdef IS_FLOAT
/* The normal distribution function at -t, where e is exp(-t*t/2). With u = 1 / (1 + 0.26 t) it is e u P(u), with a polynomial of degree 8
   that is fitted for the smallest relative error on 0 < t < 14.5 (3e-8, below rounding; beyond, it is 0 in float32). */
static INLINE float FN(tail)(float t, float e) {
    const float u = 1 / (1 + 0.26f * t);
    float p = 0.030230572315900536f;
    p = p * u + -0.15149556153818136f;
    p = p * u + 0.24873513180545118f;
    p = p * u + -0.14779110009608035f;
    p = p * u + 0.1587596717349876f;
    p = p * u + 0.051964558029153084f;
    p = p * u + 0.10278871902928527f;
    p = p * u + 0.10305097275355801f;
    p = p * u + 0.10375703871250153f;
    return e * u * p;
}
#endif

KERNEL(gelu) { /* x, out */
    const REAL *x = job->at[0];
    REAL *out = job->at[1];
    EACH for (ptrdiff_t k = start; k < stop; k++) {
        const REAL u = x[k] < -40 ? -40 : x[k];
#ifdef IS_FLOAT
        const REAL t = u < 0 ? -u : u, v = t > 40 ? 40 : t, below = FN(tail)(v, FN(exponential)(-0.5f * v * v));
        out[k] = u * (u < 0 ? below : 1 - below);
#else
        out[k] = 0.5 * u * erfc(u * -0.70710678118654752440);
#endif
    }
}

static INLINE void FN(gelu_pull)(const Job *job, ptrdiff_t start, ptrdiff_t stop, const int step) {
    const REAL *g = job->at[0], *x = job->at[1];
    REAL *out = job->at[2];
    EACH for (ptrdiff_t k = start; k < stop; k++) {
        const REAL u = x[k] < -40 ? -40 : x[k], v = u > 40 ? 40 : u; /* beyond it an infinity would meet a density of 0 */
        const REAL e = FN(exponential)(LITERAL(-0.5) * v * v);
#ifdef IS_FLOAT
        const REAL below = FN(tail)(v < 0 ? -v : v, e), cdf = v < 0 ? below : 1 - below;
#else
        const REAL cdf = 0.5 * erfc(v * -0.70710678118654752440);
#endif
        out[k] = g[k * step] * (cdf + v * (e * LITERAL(0.39894228040143267794)));
    }
}

KERNEL(gelu_backward) { /* g, x, out */
    if (job->repeated) FN(gelu_pull)(job, start, stop, 0);
    else FN(gelu_pull)(job, start, stop, 1);
}

/* One exponential, of a number that is not positive, so that neither sign overflows. */
static INLINE REAL FN(logistic)(REAL v) {
    const REAL e = FN(exponential)(v < 0 ? v : -v);
    return (v < 0 ? e : 1) / (1 + e);
}

KERNEL(sigmoid) { /* x, out */
    const REAL *x = job->at[0];
    REAL *out = job->at[1];
    EACH for (ptrdiff_t k = start; k < stop; k++) out[k] = FN(logistic)(x[k]);
}

KERNEL(swiglu) { /* up, gate, out */
    const REAL *up = job->at[0], *x = job->at[1];
    REAL *out = job->at[2];
    const int step = !job->repeated;
    EACH for (ptrdiff_t k = start; k < stop; k++) {
        const REAL v = x[k] < -10000 ? -10000 : x[k]; /* there the sigmoid is 0 */
        out[k] = v * FN(logistic)(v) * up[k * step];
    }
}

KERNEL(swiglu_backward) { /* g, gate, up, out: of the gate */
    const REAL *g = job->at[0], *x = job->at[1], *up = job->at[2];
    REAL *out = job->at[3];
    const int step = !job->repeated;
    EACH for (ptrdiff_t k = start; k < stop; k++) {
        const REAL low = x[k] < -10000 ? -10000 : x[k], v = low > 10000 ? 10000 : low, s = FN(logistic)(v);
        out[k] = g[k * step] * up[k] * (s * (1 + v * (1 - s)));
    }
}

/* A product of numbers, each the unevaluated sum of two in float64; in float32 the first alone has more digits than the result. */
#ifdef IS_FLOAT
#define TIMES(b, bl) h[k] *= (b)[k]
#else
#define TIMES(b, bl)                                                           \
    do {                                                                       \
        const double a = h[k], p = a * (b)[k];                                 \
        l[k] = fma(a, (b)[k], -p) + (a * (bl)[k] + l[k] * (b)[k]);             \
        h[k] = p;                                                              \
    } while (0)
#endif

/* x, out: to a power of which twice is an integer other than 0, by squaring. Rounded once, to within 0.501 units in the last place. */
KERNEL(power) {
    const REAL *x = job->at[0];
    REAL *out = job->at[1];
    const int twice = (int)fabs(2 * job->value), root = twice % 2, n = root ? twice : twice / 2, inverse = job->value < 0;
    int top = 1;
    while (2 * top <= n) top *= 2;
    double h[PIECE], b[PIECE];
#ifndef IS_FLOAT
    double l[PIECE], bl[PIECE];
    const int exact = n == 1 && !(root && inverse); /* one operation, which rounds rightly, also beside the middle of two numbers */
#endif
    for (ptrdiff_t i = start; i < stop; i += PIECE) {
        const ptrdiff_t m = stop - i < PIECE ? stop - i : PIECE;
        EACH for (ptrdiff_t k = 0; k < m; k++) {
            const double v = x[i + k], u = root ? sqrt(v == -INFINITY ? INFINITY : v + 0.0) : v, w = inverse ? 1 / u : u;
#ifndef IS_FLOAT
            const double rest = root ? fma(-u, u, v) / (2 * u) : 0; /* what u lacks of the root */
            bl[k] = l[k] = exact ? 0 : inverse ? w * (fma(-w, u, 1) - w * rest) : rest;
#endif
            b[k] = h[k] = w;
        }
        for (int bit = top / 2; bit; bit /= 2) {
            EACH for (ptrdiff_t k = 0; k < m; k++) TIMES(h, l);
            if (n & bit) EACH for (ptrdiff_t k = 0; k < m; k++) TIMES(b, bl);
        }
        INTEGER odd = 0; /* of the type of the elements, so that the loop becomes vectors */
        EACH for (ptrdiff_t k = 0; k < m; k++) {
#ifdef IS_FLOAT
            const REAL r = (REAL)h[k];
#else
            const double sum = h[k] + l[k]; /* no number where the first is infinite, or the inverse of that; a zero loses its sign */
            const REAL r = sum == sum && sum != 0 ? sum : h[k];
#endif
            out[i + k] = r;
            odd |= (r < 0 ? -r : r) >= SMALLEST && r - r == 0 ? 0 : 1;
        }
        if (!odd) continue;
        INTEGER infinite = 0, zero = 0, less = 0, none = 0;
        EACH for (ptrdiff_t k = 0; k < m; k++) {
            const REAL v = x[i + k], r = out[i + k], size = r < 0 ? -r : r, finite = v - v == 0 ? 1 : 0, given = v == 0 ? 0 : finite;
            zero |= finite > given && size == INFINITY ? 1 : 0;
            infinite |= given > 0 && size == INFINITY ? 1 : 0;
            less |= given > 0 && size < SMALLEST ? 1 : 0;
            none |= given > 0 && r != r ? 1 : 0;
        }
        *job->raised |= (zero ? NPY_FPE_DIVIDEBYZERO : 0) | (infinite ? NPY_FPE_OVERFLOW : 0) | (less ? NPY_FPE_UNDERFLOW : 0) |
                        (none ? NPY_FPE_INVALID : 0);
    }
}
#undef TIMES

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

PULL(tanh_backward, g * ((1 - y) * (1 + y))) /* as products: of 1 - y * y the compiler makes one rounding, and compiled chains two */
PULL(sigmoid_backward, g * (y * (1 - y)))
PULL(relu_backward, y > 0 ? g : y == y ? 0 : y)
#undef PULL

KERNEL(add_product) { /* x, total: plus x times a number, with one rounding */
    const REAL *x = job->at[0], w = (REAL)job->value;
    REAL *total = job->at[1];
    EACH for (ptrdiff_t k = start; k < stop; k++) total[k] = FMA(x[k], w, total[k]);
}

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
