"""The tape, gradients to any order, compiled programs and optimizers."""

from .compiler.compile import compile
from .jacobians import hessian, jacobian, jacobian_blocks
from .optim import optimizers as optim
from .tape.anomaly import detect_anomaly
from .tape.custom_calls import checkpoint, gradient_hook
from .tape.custom_vjp import custom_vjp
from .tape.no_grad import no_grad
from .tape.sparse import SparseGradient, gradient_rows, sparse_gradient
from .tape.tape import Tape
from .transforms import check_grads, grad, hvp, jvp, value_and_grad, vjp

__all__ = [n for n, v in globals().items() if not n.startswith("_") and (callable(v) or v is optim)]
__dir__ = __all__.copy
