"""The factor mapping of every op: tables, one a chapter of ops. Imports arrays and sharding. The legend is in
sharding/factors.py."""

from . import convolution, elementwise, experts, indexing, linalg, random, reductions, softmax, structure
