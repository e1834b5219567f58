/* Kernels over rows: norms, softmaxes and the cross-entropy. Each row passes through all its steps while it is in the first cache. */

/* Mean and deviation of a row, as x - mean - off: the mean of large numbers is rounded, and all deviations from it with it; these
   themselves are nearly exact, and so is their mean `off`. Returns one over the standard deviation. */
static INLINE REAL FN(statistics)(const REAL *x, ptrdiff_t n, REAL eps, REAL *mean, REAL *off) {
    SUM(total, n, x[k]);
    const REAL m = total / (REAL)n;
    SUM(rest, n, x[k] - m);
    const REAL o = rest / (REAL)n;
    SUM(squares, n, ((x[k] - m) - o) * ((x[k] - m) - o));
    *mean = m, *off = o;
    return 1 / SQRT(squares / (REAL)n + eps);
}

KERNEL(layer_norm) { /* x, weight, bias, out */
    const ptrdiff_t n = job->width;
    const REAL *w = job->at[1], *b = job->at[2];
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *x = (const REAL *)job->at[0] + i * n;
        REAL *out = (REAL *)job->at[3] + i * n;
        REAL m, o;
        const REAL inverse = FN(statistics)(x, n, (REAL)job->value, &m, &o);
        EACH for (ptrdiff_t k = 0; k < n; k++) out[k] = ((x[k] - m) - o) * inverse * w[k] + b[k];
    }
}

KERNEL(layer_norm_backward) { /* g, x, weight, dx, partial sums of dweight and of dbias */
    const ptrdiff_t n = job->width;
    const REAL *w = job->at[2];
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *g = (const REAL *)job->at[0] + i * job->stride, *x = (const REAL *)job->at[1] + i * n;
        REAL *out = (REAL *)job->at[3] + i * n;
        REAL *dw = (REAL *)job->at[4] + i / job->chunk * n, *db = (REAL *)job->at[5] + i / job->chunk * n;
        if (i % job->chunk == 0) memset(dw, 0, n * sizeof *dw), memset(db, 0, n * sizeof *db);
        REAL m, o;
        const REAL inverse = FN(statistics)(x, n, (REAL)job->value, &m, &o);
        SUM(along, n, g[k] * w[k]);
        SUM(across, n, g[k] * w[k] * ((x[k] - m) - o));
        const REAL level = along / (REAL)n, slope = across / (REAL)n * inverse * inverse;
        EACH for (ptrdiff_t k = 0; k < n; k++) {
            const REAL d = (x[k] - m) - o, gi = g[k];
            dw[k] += gi * (d * inverse);
            out[k] = ((gi * w[k] - level) - d * slope) * inverse;
        }
        EACH for (ptrdiff_t k = 0; k < n; k++) db[k] += g[k];
    }
}

static INLINE REAL FN(inverse_root)(const REAL *x, ptrdiff_t n, REAL eps) {
    SUM(squares, n, x[k] * x[k]);
    return 1 / SQRT(squares / (REAL)n + eps);
}

KERNEL(rms_norm) { /* x, weight, out */
    const ptrdiff_t n = job->width;
    const REAL *w = job->at[1];
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *x = (const REAL *)job->at[0] + i * n;
        REAL *out = (REAL *)job->at[2] + i * n;
        const REAL inverse = FN(inverse_root)(x, n, (REAL)job->value);
        EACH for (ptrdiff_t k = 0; k < n; k++) out[k] = x[k] * inverse * w[k];
    }
}

KERNEL(rms_norm_backward) { /* g, x, weight, dx, partial sums of dweight */
    const ptrdiff_t n = job->width;
    const REAL *w = job->at[2];
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *g = (const REAL *)job->at[0] + i * job->stride, *x = (const REAL *)job->at[1] + i * n;
        REAL *out = (REAL *)job->at[3] + i * n, *dw = (REAL *)job->at[4] + i / job->chunk * n;
        if (i % job->chunk == 0) memset(dw, 0, n * sizeof *dw);
        const REAL inverse = FN(inverse_root)(x, n, (REAL)job->value);
        SUM(along, n, g[k] * (x[k] * inverse) * w[k]);
        const REAL slope = along / (REAL)n;
        EACH for (ptrdiff_t k = 0; k < n; k++) {
            const REAL unit = x[k] * inverse, gi = g[k];
            dw[k] += gi * unit;
            out[k] = (gi * w[k] - unit * slope) * inverse;
        }
    }
}

/* ----- norms of groups of channels: a row is a group, `ignored` numbers are a channel ----- */

KERNEL(group_norm) { /* x, weight, bias, out */
    const ptrdiff_t n = job->width, each = (ptrdiff_t)job->ignored, inside = n / each;
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *x = (const REAL *)job->at[0] + i * n;
        const REAL *w = (const REAL *)job->at[1] + i % job->period * inside, *b = (const REAL *)job->at[2] + i % job->period * inside;
        REAL *out = (REAL *)job->at[3] + i * n;
        REAL m, o;
        const REAL inverse = FN(statistics)(x, n, (REAL)job->value, &m, &o);
        for (ptrdiff_t c = 0; c < inside; c++, x += each, out += each) {
            const REAL wc = w[c], bc = b[c];
            EACH for (ptrdiff_t k = 0; k < each; k++) out[k] = ((x[k] - m) - o) * inverse * wc + bc;
        }
    }
}

KERNEL(group_norm_backward) { /* g, x, weight, dx, sums of a channel of a sample for dweight and dbias */
    const ptrdiff_t n = job->width, each = (ptrdiff_t)job->ignored, inside = n / each;
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *g = (const REAL *)job->at[0] + i * job->stride, *x = (const REAL *)job->at[1] + i * n;
        const REAL *w = (const REAL *)job->at[2] + i % job->period * inside;
        REAL *out = (REAL *)job->at[3] + i * n, *dw = (REAL *)job->at[4] + i * inside, *db = (REAL *)job->at[5] + i * inside;
        REAL m, o, along = 0, across = 0;
        const REAL inverse = FN(statistics)(x, n, (REAL)job->value, &m, &o);
        for (ptrdiff_t c = 0; c < inside; c++) {
            const REAL *gc = g + c * each, *xc = x + c * each;
            SUM(total, each, gc[k]);
            SUM(product, each, gc[k] * ((xc[k] - m) - o));
            db[c] = total, dw[c] = product * inverse;
            along += total * w[c], across += product * w[c];
        }
        const REAL level = along / (REAL)n, slope = across / (REAL)n * inverse * inverse;
        for (ptrdiff_t c = 0; c < inside; c++, g += each, x += each, out += each) {
            const REAL wc = w[c];
            EACH for (ptrdiff_t k = 0; k < each; k++) out[k] = ((g[k] * wc - level) - ((x[k] - m) - o) * slope) * inverse;
        }
    }
}

/* ----- running products ----- */

KERNEL(cumulative_prod_backward) { /* g, x, out: of each element the product of those before it, times the sum of g over it and those
                                      behind it, each with the product of what lies between. No division, so that zeros are no special case. */
    const ptrdiff_t n = job->width;
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *g = (const REAL *)job->at[0] + i * job->stride, *x = (const REAL *)job->at[1] + i * n;
        REAL *out = (REAL *)job->at[2] + i * n;
        REAL sum = 0, product = 1;
        for (ptrdiff_t k = n; k--;) out[k] = sum = g[k] + (k + 1 < n ? x[k + 1] * sum : 0);
        for (ptrdiff_t k = 0; k < n; product *= x[k++]) out[k] *= product;
    }
}

/* ----- softmaxes ----- */

/* What is subtracted before exp: the largest number, unless it is infinite. */
static INLINE REAL FN(level)(const REAL *x, ptrdiff_t n) {
    const REAL m = FN(largest)(x, n);
    return m - m == 0 ? m : 0;
}

static INLINE REAL FN(total)(REAL sum, int masked) { return masked && sum == 0 ? 1 : sum; }

/* Rows x, and where they go; and to the others, where they are given, what rows are shifted by, and the sums of the exponentials. */
static INLINE void FN(softmax_rows)(const Job *job, ptrdiff_t start, ptrdiff_t stop, REAL *shifts, REAL *totals) {
    const ptrdiff_t n = job->width;
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *x = (const REAL *)job->at[0] + i * n;
        REAL *out = (REAL *)job->at[1] + i * n;
        const REAL m = FN(level)(x, n);
        EACH for (ptrdiff_t k = 0; k < n; k++) out[k] = FN(exponential)(x[k] - m);
        SUM(sum, n, out[k]);
        const REAL total = FN(total)(sum, job->flag), inverse = 1 / total;
        EACH for (ptrdiff_t k = 0; k < n; k++) out[k] *= inverse;
        if (shifts) shifts[i] = m, totals[i] = total;
    }
}

KERNEL(softmax) { FN(softmax_rows)(job, start, stop, NULL, NULL); } /* x, out; flag: rows of which nothing is left are 0 */

KERNEL(softmax_of_rows) { FN(softmax_rows)(job, start, stop, (REAL *)job->at[2], (REAL *)job->at[3]); } /* x, out, shifts, totals; flag as above */

KERNEL(log_softmax) { /* x, out; flag as above */
    const ptrdiff_t n = job->width;
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *x = (const REAL *)job->at[0] + i * n;
        REAL *out = (REAL *)job->at[1] + i * n;
        const REAL m = FN(level)(x, n);
        SUM(sum, n, FN(exponential)(x[k] - m));
        const REAL log_sum = LOG(FN(total)(sum, job->flag));
        EACH for (ptrdiff_t k = 0; k < n; k++) out[k] = (x[k] - m) - log_sum;
    }
}

KERNEL(softmax_backward) { /* g, y, out */
    const ptrdiff_t n = job->width;
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *g = (const REAL *)job->at[0] + i * job->stride, *y = (const REAL *)job->at[1] + i * n;
        REAL *out = (REAL *)job->at[2] + i * n;
        SUM(sum, n, g[k] * y[k]);
        EACH for (ptrdiff_t k = 0; k < n; k++) out[k] = (g[k] - sum) * y[k];
    }
}

KERNEL(log_softmax_backward) { /* g, y, out */
    const ptrdiff_t n = job->width;
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *g = (const REAL *)job->at[0] + i * job->stride, *y = (const REAL *)job->at[1] + i * n;
        REAL *out = (REAL *)job->at[2] + i * n;
        SUM(sum, n, g[k]);
        EACH for (ptrdiff_t k = 0; k < n; k++) out[k] = g[k] - FN(exponential)(y[k]) * sum;
    }
}

/* ----- cross-entropy; value: label smoothing; flag: `ignored` marks samples that do not count ----- */

KERNEL(cross_entropy) { /* logits, labels, out, shift, total */
    const ptrdiff_t n = job->width;
    const REAL smoothing = (REAL)job->value;
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL *x = (const REAL *)job->at[0] + i * n;
        REAL *out = (REAL *)job->at[2];
        REAL *shift = (REAL *)job->at[3] + i, *total = (REAL *)job->at[4] + i;
        const int64_t label = ((const int64_t *)job->at[1])[i];
        *shift = 0, *total = 1;
        if (job->flag && label == job->ignored) {
            out[i] = 0;
            continue;
        }
        if (label < 0 || label >= n) {
            out[i] = NAN;
            continue;
        }
        const REAL m = FN(level)(x, n);
        SUM(sum, n, FN(exponential)(x[k] - m));
        REAL loss = -(1 - smoothing) * (x[label] - m);
        if (smoothing != 0) {
            SUM(all, n, x[k] - m);
            loss -= smoothing * (all / (REAL)n);
        }
        out[i] = loss + LOG(sum);
        *shift = m, *total = sum;
    }
}

KERNEL(cross_entropy_backward) { /* g, logits, labels, shift, total, out */
    const ptrdiff_t n = job->width;
    const REAL smoothing = (REAL)job->value;
    for (ptrdiff_t i = start; i < stop; i++) {
        const REAL scale = ((const REAL *)job->at[0])[job->repeated ? 0 : i];
        const REAL *x = (const REAL *)job->at[1] + i * n, shift = ((const REAL *)job->at[3])[i];
        REAL *out = (REAL *)job->at[5] + i * n;
        const int64_t label = ((const int64_t *)job->at[2])[i];
        if (label < 0 || label >= n || (job->flag && label == job->ignored)) {
            memset(out, 0, n * sizeof *out);
            continue;
        }
        const REAL factor = scale / ((const REAL *)job->at[4])[i], even = smoothing != 0 ? smoothing / (REAL)n * scale : 0;
        EACH for (ptrdiff_t k = 0; k < n; k++) out[k] = FN(exponential)(x[k] - shift) * factor - even;
        out[label] -= (1 - smoothing) * scale;
    }
}

KERNEL(rotary_embedding) { /* x, cosines, sines, out: so many rows (`ignored`) in turn have a row of the tables, which come again and again */
    const ptrdiff_t n = job->width / 2, times = job->ignored < 1 ? 1 : (ptrdiff_t)job->ignored;
    const REAL sign = job->flag ? -1 : 1;
    for (ptrdiff_t i = start; i < stop; i++) {
        const ptrdiff_t row = i / times % job->period * n;
        const REAL *a = (const REAL *)job->at[0] + i * 2 * n, *b = a + n, *c = (const REAL *)job->at[1] + row;
        const REAL *s = (const REAL *)job->at[2] + row;
        REAL *left = (REAL *)job->at[3] + i * 2 * n, *right = left + n;
        EACH for (ptrdiff_t k = 0; k < n; k++) {
            const REAL x = a[k], y = b[k], sine = sign * s[k];
            left[k] = x * c[k] - y * sine;
            right[k] = y * c[k] + x * sine;
        }
    }
}
