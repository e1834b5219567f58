from meshtape.arrays._core cimport Now
from meshtape.autodiff.recipe cimport Recipe
