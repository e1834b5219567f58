/* Before `lanes.h` is included for the next dtype. */
#undef IS_FLOAT
#undef REAL
#undef INTEGER
#undef UNSIGNED
#undef FN
#undef LITERAL
#undef MANTISSA
#undef BIAS
#undef SHIFTER
#undef EXP_LEAST
#undef EXP_MOST
#undef LN2_HIGH
#undef LN2_LOW
#undef SQRT
#undef LOG
#undef LANES
#undef SUM
