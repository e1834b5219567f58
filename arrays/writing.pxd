from meshtape.arrays._core cimport Value
