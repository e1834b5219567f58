"""Blending: models merged by mergekit's configurations, streaming, on any layout.

`config` reads the YAML, `plan` makes a lazy tensor of each array (`blended`) with a formula of `methods`, and
``transform`` writes them. Numbers about whole tensors come from `statistics`. It imports ``transform`` and what stands
below it. Begin with `blend`.
"""
