from meshtape.arrays.core.value cimport Value
