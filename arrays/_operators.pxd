from meshtape.arrays._core cimport Now, Value
