/* What the kernels of one dtype share: sums and maxima in lanes, and exp. Included once with REAL float and once with double.

Sums are made in a fixed number of lanes, which is the one change of order against a loop over the elements: it lets the compiler use
vectors without leave to reorder anything else, and keeps more digits. NaN and infinities mean what they mean in NumPy. */

#ifdef IS_FLOAT
#define REAL float
#define INTEGER int32_t
#define UNSIGNED uint32_t
#define FN(name) name##_f32
#define LITERAL(x) x##f
#define MANTISSA 23
#define BIAS 127
#define SHIFTER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, which then stands in the last bits */
#define EXP_LEAST -104.0f   /* exp is 0 below, */
#define EXP_MOST 89.0f      /* and infinite above */
#define LN2_HIGH 0.693145751953125f
#define LN2_LOW 1.42860682030941723212e-6f
#define SMALLEST FLT_MIN
#define SQRT sqrtf
#define LOG logf
#define FMA fmaf
#else
#define REAL double
#define INTEGER int64_t
#define UNSIGNED uint64_t
#define FN(name) name##_f64
#define LITERAL(x) x
#define MANTISSA 52
#define BIAS 1023
#define SHIFTER 6755399441055744.0
#define EXP_LEAST -746.0
#define EXP_MOST 710.0
#define LN2_HIGH 0.693147180369123816490
#define LN2_LOW 1.90821492927058770002e-10
#define SMALLEST DBL_MIN
#define SQRT sqrt
#define LOG log
#define FMA fma
#endif

#define LANES (128 / (int)sizeof(REAL))

static INLINE REAL FN(fold)(REAL *lane) {
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
}

/* Declares `total`, the sum of `term` for k = 0 ... n-1. Rows shorter than the lanes are spared the work of them. */
#define SUM(total, n, term)                            \
    REAL total = 0;                                    \
    do {                                               \
        ptrdiff_t i_ = 0;                              \
        if ((n) >= LANES) {                            \
            REAL lane_[LANES] = {0};                   \
            for (; i_ + LANES <= (n); i_ += LANES)     \
                for (int j_ = 0; j_ < LANES; j_++) {   \
                    const ptrdiff_t k = i_ + j_;       \
                    lane_[j_] += (term);               \
                }                                      \
            total = FN(fold)(lane_);                   \
        }                                              \
        REAL rest_ = 0;                                \
        for (; i_ < (n); i_++) {                       \
            const ptrdiff_t k = i_;                    \
            rest_ += (term);                           \
        }                                              \
        total += rest_;                                \
    } while (0)

/* The largest of the numbers that are any; NaN is passed over. */
static INLINE REAL FN(largest)(const REAL *x, ptrdiff_t n) {
    REAL m = -INFINITY;
    ptrdiff_t i = 0;
    if (n >= LANES) {
        REAL lane[LANES];
        for (int j = 0; j < LANES; j++) lane[j] = -INFINITY;
        for (; i + LANES <= n; i += LANES)
            for (int j = 0; j < LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
        for (int half = LANES / 2; half; half /= 2)
            for (int j = 0; j < half; j++) lane[j] = lane[j + half] > lane[j] ? lane[j + half] : lane[j];
        m = lane[0];
    }
    for (; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* exp(x), within two units in the last place: x = n log 2 + r with |r| <= log(2) / 2, and the series of exp(r) as far as it counts.
   No branch and no call, so that loops over it become vectors. */
static INLINE REAL FN(exponential)(REAL x) {
    x = x < EXP_LEAST ? EXP_LEAST : x; /* in this order NaN stays */
    x = x > EXP_MOST ? EXP_MOST : x;
    const REAL shifted = x * LITERAL(1.44269504088896340736) + SHIFTER;
    const REAL n = shifted - SHIFTER;
    const REAL r = (x - n * LN2_HIGH) - n * LN2_LOW;
#ifdef IS_FLOAT
    REAL p = 1.0f / 5040;
#else
    REAL p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
#endif
    p = p * r + LITERAL(1.0) / 720;
    p = p * r + LITERAL(1.0) / 120;
    p = p * r + LITERAL(1.0) / 24;
    p = p * r + LITERAL(1.0) / 6;
    p = p * r + LITERAL(0.5);
    p = p * r * r + r + LITERAL(1.0);
    /* 2^n in two factors: one alone overflows, or loses the small results, at the ends. */
    const REAL shifter = SHIFTER;
    INTEGER bits, zero;
    memcpy(&bits, &shifted, sizeof bits);
    memcpy(&zero, &shifter, sizeof zero);
    const INTEGER whole = (INTEGER)((UNSIGNED)bits - (UNSIGNED)zero);
    const INTEGER half = whole >> 1;
    const UNSIGNED a = (UNSIGNED)(half + BIAS) << MANTISSA, b = (UNSIGNED)(whole - half + BIAS) << MANTISSA;
    REAL first, second;
    memcpy(&first, &a, sizeof first);
    memcpy(&second, &b, sizeof second);
    return p * first * second;
}
