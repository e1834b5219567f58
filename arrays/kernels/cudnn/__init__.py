"""Functions of cuDNN 9, where it is installed: convolutions by its older calls, which :mod:`.convolution` loads, and
attention by NVIDIA's frontend. Both say None where cuDNN does not serve a call."""
