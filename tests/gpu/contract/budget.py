"""The budget of the contract: launches, uploads and waits of one call in a real float on a few numbers.

Each is the count itself, and its test fails above it and below it: a change that needs less lowers it, one that needs
more has a reason. Of several calls, and of the two ways of a derivative, it is the dearest one of each kind. Steps have
a fourth number, of copies on the device or to the host.
"""

from __future__ import annotations

TABLES = {
    "ops": {
        (0, 0, 0): """
            alias; barrier; broadcast_to; conj; flip; imag; irfft; permute_dims; real; reshape; reshard;
            stop_gradient
        """,
        (1, 0, 0): """
            abs; acos; acosh; add; add_layer_norm; add_rms_norm; all; any; asin; asinh; astype; atan;
            atan2; atanh; bitwise_and; bitwise_invert; bitwise_left_shift; bitwise_or; bitwise_right_shift;
            bitwise_xor; cbrt; ceil; conv; conv_image; conv_kernel; copysign; cos; cosh; cross_entropy;
            divide; dropout; dropout_add; equal; erf; exp; exp2; expm1; floor; floor_divide; fmax; fmin;
            fmod; full_like; gelu; gelu_backward; greater; greater_equal; heaviside; huber; hypot;
            isfinite; isinf; isnan; ldexp; less; less_equal; log; log10; log1p; log2; logaddexp;
            logaddexp2; logical_and; logical_not; logical_or; logical_xor; max; maximum; min; minimum;
            multiply; negative; not_equal; pointwise; positions; positive; pow;
            random_bernoulli; random_bits; random_exponential; random_fold_in; random_gumbel;
            random_normal; random_split; random_uniform; reciprocal; relu; remainder; rint; rms_norm;
            rotary_embedding; sigmoid; signbit; silu; sin; sinh; sqrt; square; subtract; swiglu;
            swiglu_backward; tan; tanh; trunc
        """,
        (2, 0, 0): """
            argmax; argmin; cumulative_prod; cumulative_sum; float8_scale; layer_norm; layer_norm_backward;
            prod; rms_norm_backward; round; searchsorted; sign; sum; where
        """,
        (3, 0, 0): """
            batch_norm; getitem; group_norm; linear_cross_entropy; log_softmax; mean; random_permutation;
            rfft; softmax
        """,
        (4, 0, 0): """
            argsort; batch_norm_inference; cross_entropy_backward; fft; group_norm_backward;
            log_softmax_backward; softmax_backward; topk
        """,
        (4, 0, 1): "eigh; eigvalsh; svd; svdvals",
        (5, 0, 0): "concat; round_to",
        (6, 0, 0): "experts; sort",
        (7, 0, 0): "batch_norm_backward",
        (7, 0, 1): "cholesky",
        (8, 0, 0): "last_writes",
        (8, 0, 1): "eigvals",
        (8, 0, 2): "solve",
        (9, 0, 0): "experts_backward; nextafter; scatter",
        (9, 0, 2): "inv",
        (10, 0, 0): "index_add; index_set; matmul",
        (10, 0, 2): "qr",
        (11, 0, 0): "random_choice; random_integers",
        (11, 0, 1): "eig",
        (12, 0, 0): "random_truncated_normal",
        (13, 0, 1): "pinv",
        (16, 0, 0): "attention",
        (17, 0, 0): "float8_matmul",
        (19, 0, 0): "lazy_adam; slogdet",
        (21, 0, 0): "det",
        (22, 0, 0): "linear_cross_entropy_backward",
        (25, 0, 0): "attention_bias_backward",
        (40, 0, 0): "attention_backward",
        (43, 0, 0): "index_max; index_min",
        (64, 0, 1): "adjugate",
    },
    "derivatives": {
        (0, 0, 0): "alias; barrier; flip; permute_dims; real",
        (1, 0, 0): """
            abs; acos; acosh; asin; asinh; atan; atanh; cbrt; conj; cos; cosh; cross_entropy; erf; exp;
            exp2; expm1; gelu; log; log10; log1p; log2; negative; pointwise; positive; reciprocal; relu;
            sigmoid; silu; sin; sinh; sqrt; square; tan; tanh
        """,
        (2, 0, 0): "conv_image; conv_kernel; sum",
        (3, 0, 0): "astype; batch_norm; broadcast_to; dropout; huber; imag; mean; reshape",
        (4, 0, 0): "copysign; dropout_add; ldexp; sign; softmax",
        (5, 0, 0): """
            add_rms_norm; atan2; concat; conv; cumulative_sum; divide; fmax; fmin; gelu_backward; hypot;
            logaddexp; logaddexp2; maximum; minimum; multiply; swiglu; swiglu_backward
        """,
        (5, 1, 0): "pow",
        (6, 0, 0): "add; add_layer_norm; fmod; group_norm; heaviside; layer_norm; log_softmax; subtract",
        (7, 0, 0): "remainder; rms_norm; where",
        (7, 1, 0): "rfft",
        (8, 0, 0): "fft",
        (8, 0, 1): "eigvalsh; svdvals",
        (9, 0, 0): "experts; max; min; nextafter; scatter",
        (9, 2, 0): "irfft",
        (10, 2, 0): "index_add",
        (11, 0, 0): "last_writes",
        (11, 0, 2): "inv",
        (11, 2, 0): "getitem",
        (14, 0, 0): "log_softmax_backward; sort",
        (15, 0, 0): "softmax_backward",
        (16, 0, 0): "rotary_embedding",
        (19, 0, 0): "linear_cross_entropy",
        (22, 0, 2): "slogdet",
        (23, 0, 0): "cumulative_prod; matmul",
        (23, 0, 1): "eigh; pinv",
        (23, 0, 4): "solve",
        (24, 0, 0): "batch_norm_inference",
        (28, 0, 4): "cholesky",
        (28, 2, 0): "index_set",
        (31, 0, 2): "qr",
        (33, 0, 0): "cross_entropy_backward",
        (39, 0, 0): "prod",
        (39, 0, 3): "eigvals",
        (40, 0, 0): "attention",
        (41, 0, 2): "eig",
        (48, 0, 0): "linear_cross_entropy_backward",
        (48, 0, 1): "svd",
        (49, 0, 0): "rms_norm_backward",
        (53, 0, 0): "lazy_adam",
        (58, 2, 0): "index_max; index_min",
        (63, 0, 0): "group_norm_backward",
        (64, 0, 2): "adjugate",
        (65, 0, 1): "det",
        (66, 0, 0): "attention_backward; layer_norm_backward",
        (67, 0, 0): "batch_norm_backward",
        (70, 0, 0): "attention_bias_backward",
        (109, 0, 0): "experts_backward",
    },
    "steps": {
        (2, 0, 0, 0): "adamw; adamw, bfloat16, scheduled",
        (3, 0, 0, 0): "decoder, donated; layers, donated; layers, graphs",
        (4, 0, 0, 0): "clipping; decoder, graph; experts, graph",
        (6, 0, 0, 0): "averages",
        (15, 0, 0, 0): "layers, compiled",
        (26, 0, 0, 0): "layers",
        (46, 3, 2, 6): "continued from the CPU",
        (58, 3, 0, 2): "encoder of a CPU's batch",
        (133, 0, 0, 0): "decoder, bfloat16, compiled",
        (135, 0, 0, 0): "decoder, bfloat16",
        (152, 0, 0, 4): "decoder, compiled",
        (155, 0, 0, 4): "decoder",
        (155, 2, 0, 4): "decoder of a CPU's batch",
        (163, 0, 0, 4): "decoder, mesh of 1, compiled",
        (164, 2, 3, 7): "decoder, mesh of 1",
        (260, 0, 0, 4): "experts",
        (336, 0, 0, 0): "decoder, mesh of 2, compiled",
        (337, 2, 3, 3): "decoder, mesh of 2",
    },
}


def of(kind: str) -> dict[str, tuple[int, ...]]:
    """What is counted, by the name of an op or a step."""
    return {name: cost for cost, names in TABLES[kind].items() for name in " ".join(names.split()).split("; ")}
