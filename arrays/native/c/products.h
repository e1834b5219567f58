/* The products of one dtype, for each kind of vectors that processors have. */

#if HAVE_PRODUCTS
#define PRODUCT(name) FN(name##_v4)
#define VECTOR 64
#define MOST_ROWS 12
#define WITH_VECTORS __attribute__((target("arch=x86-64-v4")))
#include "product.h"
#define PRODUCT(name) FN(name##_v3)
#define VECTOR 32
#define MOST_ROWS 6
#define WITH_VECTORS __attribute__((target("arch=x86-64-v3")))
#include "product.h"
#endif
