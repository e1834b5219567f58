"""The budget of the contract: the most launches, uploads and waits of one call in a real float on a few numbers.

Each row is what was counted; a change that needs less lowers it, one that needs more has a reason. Of derivatives it is
the dearer one of the call that is recorded and the way back. Not named here
is what stays within the first line of its table.
"""

from __future__ import annotations

TABLES = {
    "ops": """
    others: 3 0 0;
    adjugate: 64 0 1; argsort: 4 0 0; attention: 16 0 0; attention_backward: 40 0 0; attention_bias_backward: 25 0 0;
    batch_norm_backward: 7 0 0; batch_norm_inference: 4 0 0; cholesky: 7 0 1; concat: 5 0 0;
    cross_entropy_backward: 4 0 0; det: 21 0 0; eig: 11 0 1;
    eigh: 4 0 1; eigvals: 8 0 1; eigvalsh: 4 0 1; experts: 6 0 0; experts_backward: 9 0 0; fft: 4 0 0;
    float8_matmul: 17 0 0; group_norm_backward: 4 0 0; index_add: 10 0 0; index_max: 43 0 0; index_min: 43 0 0;
    index_set: 10 0 0; inv: 9 0 2; last_writes: 8 0 0; lazy_adam: 19 0 0;
    linear_cross_entropy_backward: 22 0 0; log_softmax_backward: 4 0 0; matmul: 10 0 0; pinv: 13 0 1; qr: 10 0 2;
    random_choice: 20 0 0; random_integers: 11 0 0; random_truncated_normal: 12 0 0; round_to: 5 0 0; scatter: 9 0 0;
    slogdet: 19 0 0; softmax_backward: 4 0 0; solve: 8 0 2; sort: 6 0 0; svd: 4 0 1; svdvals: 4 0 1; topk: 4 0 0;
    """,
    "derivatives": """
    others: 9 0 0;
    add_layer_norm: 11 0 0; adjugate: 64 0 2; attention: 48 0 0; attention_backward: 66 0 0;
    attention_bias_backward: 70 0 0; batch_norm: 11 0 0; batch_norm_backward: 67 0 0; batch_norm_inference: 24 0 0;
    cholesky: 29 0 4; conv: 10 0 0; copysign: 5 1 0; cross_entropy_backward: 33 0 0; cumulative_prod: 25 0 0;
    cumulative_sum: 7 1 0; det: 65 0 1; eig: 41 0 2; eigh: 25 0 1; eigvals: 39 0 3; eigvalsh: 9 0 1; experts: 21 0 0;
    experts_backward: 109 0 0; getitem: 12 2 1; group_norm: 12 0 0; group_norm_backward: 63 0 0; index_add: 19 2 1;
    index_max: 58 2 1; index_min: 58 2 1; index_set: 30 2 1; inv: 11 0 2; irfft: 9 2 0; last_writes: 11 0 0;
    layer_norm: 10 0 0; layer_norm_backward: 66 0 0; lazy_adam: 54 0 0; linear_cross_entropy: 23 0 0;
    linear_cross_entropy_backward: 48 0 0; log_softmax_backward: 14 0 0; matmul: 23 0 0; nextafter: 4 1 0;
    pinv: 23 0 1; pow: 6 1 0; prod: 39 0 0; qr: 31 0 2; rfft: 7 1 0; rms_norm: 11 0 0; rms_norm_backward: 49 0 0;
    rotary_embedding: 16 0 0; sign: 4 1 0; slogdet: 22 0 2; softmax_backward: 15 0 0; solve: 23 0 4; sort: 14 0 0;
    svd: 49 0 1; svdvals: 8 0 1;
    """,
    "steps": """
    others: 0 0 0;
    adamw: 2 0 0; adamw, bfloat16, scheduled: 2 0 0; averages: 6 0 0; clipping: 4 0 0; decoder: 155 0 0;
    decoder, compiled: 152 0 0; decoder, graph: 4 0 0; decoder, donated: 3 0 0; decoder, bfloat16: 135 0 0;
    decoder, bfloat16, compiled: 133 0 0; experts: 260 0 0; layers: 26 0 0;
    decoder of a CPU's batch: 155 2 0; encoder of a CPU's batch: 58 3 0; continued from the CPU: 46 3 2;
    layers, compiled: 15 0 0; layers, graphs: 3 0 0; layers, donated: 3 0 0; experts, graph: 4 0 0;
    """,
}


def of(kind: str, name: str) -> tuple[int, ...]:
    """Launches, uploads and waits of an op or a step."""
    rows = dict(row.split(": ") for row in map(str.strip, TABLES[kind].split(";")) if row)
    return tuple(map(int, rows.get(name, rows["others"]).split()))
