"""Compilers' caches of all environments of a store: what there is, how much may stay, how it is carried."""
