from meshtape.arrays.core.value cimport Now, Value
