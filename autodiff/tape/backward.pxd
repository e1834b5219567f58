from meshtape.arrays.core.value cimport Now
from meshtape.autodiff.tape.vjp_plan cimport Recipe
