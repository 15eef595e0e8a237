"""Files of weights on disk: opened lazily; pickles and archives are checked before use."""
