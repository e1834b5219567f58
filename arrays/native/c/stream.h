/* Copies past the caches. An ordinary store reads the line that it writes, and what it writes takes the place of what is needed
   again; where a result is larger than the caches both are lost. */

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>

static void stream_run(char *to, const char *from, size_t n) {
    size_t head = -(uintptr_t)to % 64;
    if (head > n) head = n;
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= 64; to += 64, from += 64, n -= 64) { /* a whole line at a time: it leaves at once */
        const __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
        const __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    memcpy(to, from, n);
}

/* Other processors see these stores before any later one. */
static void stream_end(void) { _mm_sfence(); }

#else /* elsewhere the system's copy knows best */

static void stream_run(char *to, const char *from, size_t n) { memcpy(to, from, n); }
static void stream_end(void) {}

#endif

#define STREAM_DIMENSIONS 16

/* Whether `from` can be copied to `to` in runs of bytes that lie together in both; how long the runs are, and over how many
   dimensions they repeat. */
static int stream_layout(const View *to, const View *from, size_t *run, int *outer) {
    if (to->ndim != from->ndim || to->ndim > STREAM_DIMENSIONS || to->itemsize != from->itemsize) return 0;
    for (int d = 0; d < to->ndim; d++)
        if (to->shape[d] != from->shape[d]) return 0;
    *run = to->itemsize, *outer = to->ndim;
    while (*outer) {
        const int d = *outer - 1;
        const Py_ssize_t there = (Py_ssize_t)*run;
        if (to->shape[d] != 1 && (to->strides[d] != there || from->strides[d] != there)) break;
        *run *= to->shape[d], --*outer;
    }
    return 1;
}

static void stream_copy(const View *to, const View *from, size_t run, int outer) {
    Py_ssize_t at[STREAM_DIMENSIONS] = {0};
    char *t = to->buf;
    const char *f = from->buf;
    for (;;) {
        stream_run(t, f, run);
        int d = outer - 1;
        for (; d >= 0; d--) {
            t += to->strides[d], f += from->strides[d];
            if (++at[d] < to->shape[d]) break;
            t -= at[d] * to->strides[d], f -= at[d] * from->strides[d];
            at[d] = 0;
        }
        if (d < 0) break;
    }
    stream_end();
}
