"""Derivatives of the functions of ``mt.nn``; legend in ``registry``.

Most ops have a backward op. It has no rule of its own: the engine differentiates its decomposition, which is right at
every order. Each of the three forms of convolution is the derivative of the other two.
"""

from __future__ import annotations

from ...arrays.nn import attention as a
from ...arrays.nn import convolution as c
from ...arrays.nn import cross_entropy as ce
from ...arrays.nn import dropout, rotary
from ...arrays.nn import linear_cross_entropy as lce
from ...arrays.nn import mixture_of_experts as e
from ...arrays.nn import softmax as s
from ...arrays.nn.norms import batch_norm, group_norm, layer_norm
from .registry import call, conj, defvjp, defvjp_all, same

# ----- softmax, attention and losses ----------------------------------------------------------------------------------

defvjp(s.SOFTMAX, x=lambda xp, g, ans, axis: call(xp, s.SOFTMAX_BACKWARD, g, ans, axis=axis))
defvjp(s.LOG_SOFTMAX, x=lambda xp, g, ans, axis: call(xp, s.LOG_SOFTMAX_BACKWARD, g, ans, axis=axis))


def _cross_entropy(xp, g, logits, labels, ans_1, ans_2, ignore_index, label_smoothing):
    if g[0] is None:  # the other results are constants
        return None, None
    params = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return call(xp, ce.CROSS_ENTROPY_BACKWARD, g[0], logits, labels, ans_1, ans_2, **params), None


defvjp_all(ce.CROSS_ENTROPY, _cross_entropy, partial=True)


def _attention(xp, g, query, key, value, ans_0, ans_1, ans_2, mask, scale, diagonal):
    if g[0] is None:  # the other results are constants
        return (None,) * (3 + len(mask))
    added = bool(mask) and mask[0].dtype.kind != "b"
    op = a.ATTENTION_BIAS_BACKWARD if added else a.ATTENTION_BACKWARD
    found = call(xp, op, g[0], query, key, value, ans_0, ans_1, ans_2, *mask, scale=scale, diagonal=diagonal)
    return (*found, None) if mask and not added else found


defvjp_all(a.ATTENTION, _attention, partial=True)


def _linear_cross_entropy(xp, g, hidden, weight, labels, ans_1, ans_2, ignore_index, label_smoothing):
    if g[0] is None:
        return None, None, None
    params = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return *call(xp, lce.LINEAR_CROSS_ENTROPY_BACKWARD, g[0], hidden, weight, labels, ans_1, ans_2, **params), None


defvjp_all(lce.LINEAR_CROSS_ENTROPY, _linear_cross_entropy, partial=True)

# ----- rotary positions ----------------------------------------------------------------------------------------------


def _halves(x):
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def _turned_back(xp, g, cosines, sines, inverse):
    return call(xp, rotary.ROTARY_EMBEDDING, g, conj(xp, cosines), conj(xp, sines), inverse=not inverse)


def _along(xp, g, x):
    (ga, gb), (a, b) = _halves(g), _halves(conj(xp, x))
    return ga * a + gb * b


def _across(xp, g, x, inverse):
    (ga, gb), (a, b) = _halves(g), _halves(conj(xp, x))
    return ga * b - gb * a if inverse else gb * a - ga * b


defvjp(rotary.ROTARY_EMBEDDING, x=_turned_back, cosines=_along, sines=_across)

# ----- convolution ----------------------------------------------------------------------------------------------------


def _conv_x(xp, g, w, x_like, padding, stride, dilation, groups):
    how = {"padding": padding, "stride": stride, "dilation": dilation, "groups": groups}
    return call(xp, c.CONV_IMAGE, g, conj(xp, w), image=tuple(x_like.shape[2:]), **how)


def _conv_w(xp, g, x, w_like, padding, stride, dilation, groups):
    how = {"padding": padding, "stride": stride, "dilation": dilation, "groups": groups}
    return call(xp, c.CONV_KERNEL, g, conj(xp, x), kernel=tuple(w_like.shape[2:]), **how)


def _image_y(xp, g, w, padding, stride, dilation, groups):
    return call(xp, c.CONV, g, conj(xp, w), padding=padding, stride=stride, dilation=dilation, groups=groups)


def _image_w(xp, g, y, w_like, padding, stride, dilation, groups):
    how = {"padding": padding, "stride": stride, "dilation": dilation, "groups": groups}
    return call(xp, c.CONV_KERNEL, conj(xp, y), g, kernel=tuple(w_like.shape[2:]), **how)


def _kernel_y(xp, g, x, padding, stride, dilation, groups):
    return call(xp, c.CONV, conj(xp, x), g, padding=padding, stride=stride, dilation=dilation, groups=groups)


def _kernel_x(xp, g, y, x_like, padding, stride, dilation, groups):
    how = {"padding": padding, "stride": stride, "dilation": dilation, "groups": groups}
    return call(xp, c.CONV_IMAGE, conj(xp, y), g, image=tuple(x_like.shape[2:]), **how)


defvjp(c.CONV, x=_conv_x, w=_conv_w)
defvjp(c.CONV_IMAGE, y=_image_y, w=_image_w)
defvjp(c.CONV_KERNEL, y=_kernel_y, x=_kernel_x)

# ----- norms ----------------------------------------------------------------------------------------------------------


def _of_rows(backward):
    return lambda xp, g, x, weight, naxes, eps: call(xp, backward, g, x, weight, naxes=naxes, eps=eps)


def _of_sum(backward):
    def rule(xp, g, weight, ans_1, naxes, eps):
        g, g_sum = g
        if g is None:
            return g_sum, g_sum, None, None
        joined = () if g_sum is None else (g_sum,)
        dx, *rest = call(xp, backward, g, ans_1, weight, *joined, naxes=naxes, eps=eps)
        return dx, dx, *rest

    return rule


def _group_norm(xp, g, x, weight, num_groups, axis, eps):
    return call(xp, group_norm.GROUP_NORM_BACKWARD, g, x, weight, num_groups=num_groups, axis=axis, eps=eps)


def _batch_norm(xp, g, x, weight, ans_1, ans_2, axis, eps):
    # The running statistics are constants.
    given = (*g[:3], ans_1, ans_2, x, weight)
    return *call(xp, batch_norm.BATCH_NORM_BACKWARD, *given, axis=axis, eps=eps), None, None


defvjp_all(layer_norm.LAYER_NORM, _of_rows(layer_norm.LAYER_NORM_BACKWARD))
defvjp_all(layer_norm.RMS_NORM, _of_rows(layer_norm.RMS_NORM_BACKWARD))
defvjp_all(layer_norm.ADD_LAYER_NORM, _of_sum(layer_norm.LAYER_NORM_BACKWARD), partial=True)
defvjp_all(layer_norm.ADD_RMS_NORM, _of_sum(layer_norm.RMS_NORM_BACKWARD), partial=True)
defvjp_all(group_norm.GROUP_NORM, _group_norm)
defvjp_all(batch_norm.BATCH_NORM, _batch_norm)


def _inference(xp, g, x, mean, var, weight, axis, eps):
    wide, along = batch_norm.sums_along_deviations(xp, g, x, mean, axis)
    w, v = (p.astype(wide.dtype, copy=False) for p in (weight, var))
    inverse = (v + eps) ** -0.5
    scale, of_weight = w * inverse, along * inverse
    total = xp.sum(wide, axis=batch_norm.other_axes(g.ndim, axis))
    dx = wide * batch_norm.shaped(scale, g.ndim, axis)
    return dx, -scale * total, -0.5 * scale * inverse * of_weight, of_weight, total


defvjp_all(batch_norm.BATCH_NORM_INFERENCE, _inference)

# ----- dropout and experts --------------------------------------------------------------------------------------------


def _dropped(xp, g, key, rate, offset, global_shape):
    return call(xp, dropout.DROPOUT, g, key, rate=rate, offset=offset, global_shape=global_shape)


defvjp(dropout.DROPOUT, x=_dropped)
defvjp(dropout.DROPOUT_ADD, x=_dropped, y=same)


def _experts(xp, g, x, chosen, weights, gate, up, down, numbers):
    dx, dweights, *matrices = call(xp, e.EXPERTS_BACKWARD, g, x, chosen, weights, gate, up, down, numbers)
    return dx, None, dweights, *matrices, None


defvjp_all(e.EXPERTS, _experts)
