"""Derivatives of convolution; legend in ``registry``. Each of the three forms is the derivative of the other two."""

from __future__ import annotations

from ...arrays.nn import convolution as c
from .registry import call, conj, defvjp


def _conv_x(xp, g, w, x_like, stride, dilation, groups):
    how = {"stride": stride, "dilation": dilation, "groups": groups}
    return call(xp, c.CONV_IMAGE, g, conj(xp, w), image=tuple(x_like.shape[2:]), **how)


def _conv_w(xp, g, x, w_like, stride, dilation, groups):
    how = {"stride": stride, "dilation": dilation, "groups": groups}
    return call(xp, c.CONV_KERNEL, g, conj(xp, x), kernel=tuple(w_like.shape[2:]), **how)


def _image_y(xp, g, w, stride, dilation, groups):
    return call(xp, c.CONV, g, conj(xp, w), stride=stride, dilation=dilation, groups=groups)


def _image_w(xp, g, y, w_like, stride, dilation, groups):
    how = {"stride": stride, "dilation": dilation, "groups": groups}
    return call(xp, c.CONV_KERNEL, conj(xp, y), g, kernel=tuple(w_like.shape[2:]), **how)


def _kernel_y(xp, g, x, stride, dilation, groups):
    return call(xp, c.CONV, conj(xp, x), g, stride=stride, dilation=dilation, groups=groups)


def _kernel_x(xp, g, y, x_like, stride, dilation, groups):
    how = {"stride": stride, "dilation": dilation, "groups": groups}
    return call(xp, c.CONV_IMAGE, conj(xp, y), g, image=tuple(x_like.shape[2:]), **how)


defvjp(c.CONV, x=_conv_x, w=_conv_w)
defvjp(c.CONV_IMAGE, y=_image_y, w=_image_w)
defvjp(c.CONV_KERNEL, y=_kernel_y, x=_kernel_x)
